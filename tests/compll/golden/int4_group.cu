constexpr int encode_statics = 1;
extern "C" __global__ void __launch_bounds__(256) encode_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, u8* __restrict__ out, const i64* at, const double* st, u64 seed, u64 base_step, const u64* tick, float scale, int back, i64* used) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  XT* const xs = x + table[5 * p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const i64 tensor = table[5 * p + 2];
  const u64 step = base_step + (tick ? *tick : 0);
  const i64 offset = table[5 * p + 3];
  const float s3 = scale;
  const double s9 = (double)st[p * encode_statics + 0];
  const float s10 = (float)s9;
  u8* const payload = out + at[p];
  const i64 s28 = op_add(n, 63ll);
  const i64 s29 = s28 / 64ll;
  const i64 s30 = op_mul(s29, 2ll);
  const i64 s31 = op_add(0ll, s30);
  const int u = threadIdx.x % 4, team = threadIdx.x / 4;
  const i64 t = own * 64 + team, o = t * 64;
  __shared__ i64 keys[2];
  const i64 block_begin = offset + own * 4096;
  block_keys(keys + 0, seed, step, tensor, 0, block_begin);
  __syncthreads();
  __shared__ u8 codes[1][4096];
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 64 ? 64 : size > o ? (int)(size - o) : 0;
    const i64 begin = offset + o;
    const int high = (int)((begin >> 32) - (block_begin >> 32));
    const u64 r0 = keys[0 + high];
    const bool whole = READY || __all_sync(FULL, m == 0 || m == 64);
    const int c = 0;
    float r_xs[16];
    #pragma unroll
    for (int k = 0; k < 4; ++k) load4<READY>(xs, o + (c * 4 + k) * 16 + 4 * u, m - ((c * 4 + k) * 16 + 4 * u), r_xs + 4 * k);
    i32 a1 = -2147483647;
    {
      #pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int k = c * 4 + row, l = k * 16 + 4 * u;
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v2 = r_xs[4 * row + j];
          const float v4 = op_mul(v2, s3);
          const float v5 = op_abs(v4);
          if (i < m) a1 = op_max(a1, op_magnitude_bits(v4));
        }
      }
    }
    const i32 v6 = team_max<4>(a1);
    const float v7 = op_from_key(v6);
    const bool v8 = v7 > (float)0.0;
    const float v11 = op_max(s10, v7);
    const float v12 = op_where(v8, v11, v7);
    const float v13 = op_bfloat16_up(v12);
    if (m && u == 0) store_bfloat16<READY>((payload + 0ll) + t * 2, (float)v13);
    const float v14 = (float)7.0 / v13;
    const float v15 = op_bfloat16(v13);
    const float v16 = v15 / (float)7.0;
    u32 w_q[2] = {};
    {
      #pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int k = c * 4 + row, l = k * 16 + 4 * u;
        float y_2[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v17 = r_xs[4 * row + j];
          const float v18 = op_mul(v17, s3);
          const float v19 = op_mul(v18, v14);
          const float v20 = uniform(begin + i, r0);
          const float v21 = op_add(v19, v20);
          const float v22 = op_floor(v21);
          const float v23 = op_add(v22, (float)7.0);
          const i32 v24 = op_code(v23, 15);
          const i32 v25 = op_sub(v24, 7);
          const float v26 = (float)v25;
          const float v27 = op_mul(v26, v16);
          if (whole) w_q[k % 2] |= (u32)v24 << (8 * j + 4 * (k / 2));
          else if (i < m) codes[0][team * 64 + i] = (u8)v24;
          y_2[j] = v27;
        }
        if (back) store4<READY>(xs, o + l, m - l, y_2);
      }
    }
    if (whole) {
      #pragma unroll
      for (int q = 0; q < 2; ++q) if (m) store_codes<READY>((payload + s31) + t * 32 + 16 * q + 4 * u, w_q[q]);
    }
    else
    {
      __syncwarp();
      pack_short<4>(codes[0] + team * 64, (payload + s31) + t * 32, m, u, 4);
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((payload + 0ll), 2) && aligned((payload + s31), 2) && __all_sync(FULL, size - o >= 64)) tile(Ready<true>()); else tile(Ready<false>());
}
extern "C" __global__ void __launch_bounds__(256) decode_set_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, const u8* __restrict__ data, const i64* at_in, const i64* used_in, const double* st, u64 base_step, const u64* tick, u32* errors, int payloads) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const u8* const incoming = data + at_in[p];
  const i64 s3 = op_add(n, 63ll);
  const i64 s4 = s3 / 64ll;
  const i64 s5 = op_mul(s4, 2ll);
  const i64 s6 = op_add(0ll, s5);
  XT* const xs = x + table[5 * p];
  const int u = threadIdx.x % 4, team = threadIdx.x / 4;
  const i64 t = own * 64 + team, o = t * 64;
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 64 ? 64 : size > o ? (int)(size - o) : 0;
    const int c = 0;
    const float v1 = m ? (float)load_bfloat16<READY>((incoming + 0ll) + t * 2) : (float)0;
    const float v2 = v1 / (float)7.0;
    {
      #pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int k = c * 4 + row, l = k * 16 + 4 * u;
        u32 q_q[4];
        if (READY || m == 64) {
          const u32 word = load_codes<READY>((incoming + s6) + t * 32 + 16 * (k % 2) + 4 * u);
          for (int e = 0; e < 4; ++e) q_q[e] = word >> (8 * e + 4 * (k / 2)) & 15u;
        }
        else
        for (int e = 0; e < 4; ++e) q_q[e] = l + e < m ? code_at<4>((incoming + s6) + t * 32, m, l + e) : 0;
        float y_0[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const i32 v7 = (i32)q_q[j];
          const i32 v8 = op_sub(v7, 7);
          const float v9 = (float)v8;
          const float v10 = op_mul(v9, v2);
          y_0[j] = v10;
        }
        store4<READY>(xs, o + l, m - l, y_0);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((incoming + s6), 2) && aligned((incoming + 0ll), 2) && __all_sync(FULL, size - o >= 64)) tile(Ready<true>()); else tile(Ready<false>());
}
extern "C" __global__ void __launch_bounds__(256) decode_add_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, const u8* __restrict__ data, const i64* at_in, const i64* used_in, const double* st, u64 base_step, const u64* tick, u32* errors, int payloads) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  for (int q = 0; q < payloads; ++q, at_in += pieces) {
  XT* const xs = x + table[5 * p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const u8* const incoming = data + at_in[p];
  const i64 s3 = op_add(n, 63ll);
  const i64 s4 = s3 / 64ll;
  const i64 s5 = op_mul(s4, 2ll);
  const i64 s6 = op_add(0ll, s5);
  const int u = threadIdx.x % 4, team = threadIdx.x / 4;
  const i64 t = own * 64 + team, o = t * 64;
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 64 ? 64 : size > o ? (int)(size - o) : 0;
    const int c = 0;
    float r_xs[16];
    #pragma unroll
    for (int k = 0; k < 4; ++k) load4<READY>(xs, o + (c * 4 + k) * 16 + 4 * u, m - ((c * 4 + k) * 16 + 4 * u), r_xs + 4 * k);
    const float v1 = m ? (float)load_bfloat16<READY>((incoming + 0ll) + t * 2) : (float)0;
    const float v2 = v1 / (float)7.0;
    {
      #pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int k = c * 4 + row, l = k * 16 + 4 * u;
        u32 q_q[4];
        if (READY || m == 64) {
          const u32 word = load_codes<READY>((incoming + s6) + t * 32 + 16 * (k % 2) + 4 * u);
          for (int e = 0; e < 4; ++e) q_q[e] = word >> (8 * e + 4 * (k / 2)) & 15u;
        }
        else
        for (int e = 0; e < 4; ++e) q_q[e] = l + e < m ? code_at<4>((incoming + s6) + t * 32, m, l + e) : 0;
        float y_0[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v7 = r_xs[4 * row + j];
          const i32 v8 = (i32)q_q[j];
          const i32 v9 = op_sub(v8, 7);
          const float v10 = (float)v9;
          const float v11 = op_mul(v10, v2);
          const float v12 = op_add(v7, v11);
          y_0[j] = v12;
        }
        store4<READY>(xs, o + l, m - l, y_0);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((incoming + s6), 2) && aligned((incoming + 0ll), 2) && __all_sync(FULL, size - o >= 64)) tile(Ready<true>()); else tile(Ready<false>());
  }
}
