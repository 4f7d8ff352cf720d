constexpr int encode_statics = 2;
constexpr int encode_slots = 3;
extern "C" __global__ void __launch_bounds__(256) encode_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, u8* __restrict__ out, const i64* at, const double* st, u64 seed, u64 base_step, const u64* tick, float scale, int back, i64* used, u32* part1, u32* part2, u32* part3, u32* part4, u64* sc) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  u32* const p_part2 = part2 + item_at[0 * (pieces + 1) + p] * (i64)1;
  u32* const p_part3 = part3 + item_at[0 * (pieces + 1) + p] * (i64)1;
  XT* const xs = x + table[5 * p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const float s6 = scale;
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  i32 own_part1 = -2147483647;
  i32 own_part4 = -2147483647;
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const int c = 0;
    float r_xs[32];
    #pragma unroll
    for (int k = 0; k < 8; ++k) load4<READY>(xs, o + (c * 8 + k) * 128 + 4 * u, m - ((c * 8 + k) * 128 + 4 * u), r_xs + 4 * k);
    i32 a1 = -2147483647;
    float a2[4];
    float a3[4];
    i32 a4 = -2147483647;
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v5 = r_xs[4 * row + j];
          const float v7 = op_mul(v5, s6);
          const float v8 = op_abs(v7);
          const float v9 = op_mul(v7, v7);
          const i32 v10 = op_magnitude_bits(v7);
          if (i < m) a1 = op_max(a1, op_magnitude_bits(v7));
          a2[j] = k ? a2[j] + (i < m ? v9 : 0.0f) : i < m ? v9 : 0.0f;
          a3[j] = k ? a3[j] + (i < m ? v7 : 0.0f) : i < m ? v7 : 0.0f;
          if (i < m) a4 = op_max(a4, v10);
        }
      }
    }
    own_part1 = a1;
    const float v11 = team_sum<32>(a2[0], a2[1], a2[2], a2[3]);
    if (m && u == 0) p_part2[t] = (u32)__float_as_int(v11);
    const float v12 = team_sum<32>(a3[0], a3[1], a3[2], a3[3]);
    if (m && u == 0) p_part3[t] = (u32)__float_as_int(v12);
    own_part4 = a4;
  };
  if (aligned(xs, 4 * sizeof(*xs)) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
  __shared__ i32 parts[2][8];
  own_part1 = team_max<32>(own_part1);
  if (threadIdx.x % 32 == 0) parts[0][threadIdx.x / 32] = own_part1;
  own_part4 = team_max<32>(own_part4);
  if (threadIdx.x % 32 == 0) parts[1][threadIdx.x / 32] = own_part4;
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < 8; ++w) own_part1 = op_max(own_part1, parts[0][w]);
  part1[blockIdx.x] = (u32)own_part1;
  for (int w = 1; w < 8; ++w) own_part4 = op_max(own_part4, parts[1][w]);
  part4[blockIdx.x] = (u32)own_part4;
}
extern "C" __global__ void __launch_bounds__(256) encode_piece1(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, u8* __restrict__ out, const i64* at, const double* st, u64 seed, u64 base_step, const u64* tick, float scale, int back, i64* used, u32* part1, u32* part2, u32* part3, u32* part4, u64* sc) {
  const int p = blockIdx.x;
  const i64 n = table[5 * p + 1];
  if (n == 0) return;
  const double s1 = (n ? (double)op_from_key(block_max(part1 + first[0 * (pieces + 1) + p], (n + 8191) / 8192)) : 0.0);
  const double s2 = (double)st[p * encode_statics + 0];
  u32* const p_part2 = part2 + item_at[0 * (pieces + 1) + p] * (i64)1;
  const double s3 = block_sum(p_part2, (n + 1023) / 1024);
  const double s4 = (double)st[p * encode_statics + 1];
  const double s5 = s3 / s4;
  u32* const p_part3 = part3 + item_at[0 * (pieces + 1) + p] * (i64)1;
  const double s6 = block_sum(p_part3, (n + 1023) / 1024);
  const double s7 = s6 / s4;
  const double s8 = op_mul(s7, s7);
  const double s9 = op_sub(s5, s8);
  const double s10 = op_max(s9, 0.0);
  const double s11 = op_sqrt(s10);
  const double s12 = op_mul(s2, s11);
  const double s13 = op_min(s1, s12);
  if (threadIdx.x == 0) sc[p * encode_slots + 2] = slot_of(s13);
  const float s14 = (float)s13;
  if (threadIdx.x == 0) sc[p * encode_slots + 0] = slot_of(s14);
  const double s15 = op_float32(s13);
  const float s16 = (float)s15;
  if (threadIdx.x == 0) sc[p * encode_slots + 1] = slot_of(s16);
}
extern "C" __global__ void __launch_bounds__(256) encode_walk2(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, u8* __restrict__ out, const i64* at, const double* st, u64 seed, u64 base_step, const u64* tick, float scale, int back, i64* used, u32* part1, u32* part2, u32* part3, u32* part4, u64* sc) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  XT* const xs = x + table[5 * p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const i64 tensor = table[5 * p + 2];
  const u64 step = base_step + (tick ? *tick : 0);
  const i64 offset = table[5 * p + 3];
  const float s2 = held<float>(sc[p * encode_slots + 0]);
  const float s5 = scale;
  const float s15 = held<float>(sc[p * encode_slots + 1]);
  u8* const payload = out + at[p];
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  __shared__ i64 keys[2];
  const i64 block_begin = offset + own * 8192;
  block_keys(keys + 0, seed, step, tensor, 0, block_begin);
  __syncthreads();
  __shared__ u8 codes[1][8192];
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const i64 begin = offset + o;
    const int high = (int)((begin >> 32) - (block_begin >> 32));
    const u64 r0 = keys[0 + high];
    const bool whole = READY || __all_sync(FULL, m == 0 || m == 1024);
    const int c = 0;
    float r_xs[32];
    #pragma unroll
    for (int k = 0; k < 8; ++k) load4<READY>(xs, o + (c * 8 + k) * 128 + 4 * u, m - ((c * 8 + k) * 128 + 4 * u), r_xs + 4 * k);
    u32 w_q[2] = {};
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        float y_1[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v1 = uniform(begin + i, r0);
          const float v3 = op_mul(v1, s2);
          const float v4 = r_xs[4 * row + j];
          const float v6 = op_mul(v4, s5);
          const float v7 = op_abs(v6);
          const bool v8 = v3 < v7;
          const bool v9 = v6 < (float)0.0;
          const i32 v10 = op_where(v9, 0, 2);
          const i32 v11 = op_where(v8, v10, 1);
          const i32 v12 = op_code(v11, 3);
          const i32 v13 = op_sub(v12, 1);
          const float v14 = (float)v13;
          const float v16 = op_mul(v14, s15);
          if (whole) w_q[k % 2] |= (u32)v12 << (8 * j + 2 * (k / 2));
          else if (i < m) codes[0][team * 1024 + i] = (u8)v12;
          y_1[j] = v16;
        }
        if (back) store4<READY>(xs, o + l, m - l, y_1);
      }
    }
    if (whole) {
      #pragma unroll
      for (int q = 0; q < 2; ++q) if (m) store_codes<READY>((payload + 4ll) + t * 256 + 128 * q + 4 * u, w_q[q]);
    }
    else
    {
      __syncwarp();
      pack_short<2>(codes[0] + team * 1024, (payload + 4ll) + t * 256, m, u, 32);
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((payload + 4ll), 2) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
}
extern "C" __global__ void __launch_bounds__(256) encode_piece3(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, u8* __restrict__ out, const i64* at, const double* st, u64 seed, u64 base_step, const u64* tick, float scale, int back, i64* used, u32* part1, u32* part2, u32* part3, u32* part4, u64* sc) {
  const int p = blockIdx.x;
  const i64 n = table[5 * p + 1];
  if (n == 0) return;
  const double s1 = held<double>(sc[p * encode_slots + 2]);
  u8* const payload = out + at[p];
  if (threadIdx.x == 0) store_float32((payload + 0ll), (float)s1);
  const i32 s2 = block_max(part4 + first[0 * (pieces + 1) + p], (n + 8191) / 8192);
  const bool s3 = s2 >= 2139095040;
  const i32 s4 = (i32)s3;
  const i64 s5 = n / 1024ll;
  const i64 s6 = op_mul(s5, 256ll);
  const i64 s7 = n % 1024ll;
  const i64 s8 = op_mul(s7, 2ll);
  const i64 s9 = op_add(s8, 7ll);
  const i64 s10 = s9 / 8ll;
  const i64 s11 = op_add(s6, s10);
  const i64 s12 = op_add(4ll, s11);
  if (threadIdx.x == 0) store_byte((payload + s12), (i64)s4);
}
extern "C" __global__ void __launch_bounds__(256) decode_set_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, const u8* __restrict__ data, const i64* at_in, const i64* used_in, const double* st, u64 base_step, const u64* tick, u32* errors, int payloads) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const u8* const incoming = data + at_in[p];
  const double s4 = (double)load_float32((incoming + 0ll));
  const float s5 = (float)s4;
  const i64 s7 = n / 1024ll;
  const i64 s8 = op_mul(s7, 256ll);
  const i64 s9 = n % 1024ll;
  const i64 s10 = op_mul(s9, 2ll);
  const i64 s11 = op_add(s10, 7ll);
  const i64 s12 = s11 / 8ll;
  const i64 s13 = op_add(s8, s12);
  const i64 s14 = op_add(4ll, s13);
  const i32 s15 = (i32)load_byte((incoming + s14));
  const bool s16 = s15 != 0;
  XT* const xs = x + table[5 * p];
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const int c = 0;
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        u32 q_q[4];
        if (READY || m == 1024) {
          const u32 word = load_codes<READY>((incoming + 4ll) + t * 256 + 128 * (k % 2) + 4 * u);
          for (int e = 0; e < 4; ++e) q_q[e] = word >> (8 * e + 2 * (k / 2)) & 3u;
        }
        else
        for (int e = 0; e < 4; ++e) q_q[e] = l + e < m ? code_at<2>((incoming + 4ll) + t * 256, m, l + e) : 0;
        float y_0[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const i32 v1 = (i32)q_q[j];
          const i32 v2 = op_sub(v1, 1);
          const float v3 = (float)v2;
          const float v6 = op_mul(v3, s5);
          const float v17 = op_where(s16, (float)D_NAN, v6);
          y_0[j] = v17;
        }
        store4<READY>(xs, o + l, m - l, y_0);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((incoming + 4ll), 2) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
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
  const double s5 = (double)load_float32((incoming + 0ll));
  const float s6 = (float)s5;
  const i64 s9 = n / 1024ll;
  const i64 s10 = op_mul(s9, 256ll);
  const i64 s11 = n % 1024ll;
  const i64 s12 = op_mul(s11, 2ll);
  const i64 s13 = op_add(s12, 7ll);
  const i64 s14 = s13 / 8ll;
  const i64 s15 = op_add(s10, s14);
  const i64 s16 = op_add(4ll, s15);
  const i32 s17 = (i32)load_byte((incoming + s16));
  const bool s18 = s17 != 0;
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const int c = 0;
    float r_xs[32];
    #pragma unroll
    for (int k = 0; k < 8; ++k) load4<READY>(xs, o + (c * 8 + k) * 128 + 4 * u, m - ((c * 8 + k) * 128 + 4 * u), r_xs + 4 * k);
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        u32 q_q[4];
        if (READY || m == 1024) {
          const u32 word = load_codes<READY>((incoming + 4ll) + t * 256 + 128 * (k % 2) + 4 * u);
          for (int e = 0; e < 4; ++e) q_q[e] = word >> (8 * e + 2 * (k / 2)) & 3u;
        }
        else
        for (int e = 0; e < 4; ++e) q_q[e] = l + e < m ? code_at<2>((incoming + 4ll) + t * 256, m, l + e) : 0;
        float y_0[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v1 = r_xs[4 * row + j];
          const i32 v2 = (i32)q_q[j];
          const i32 v3 = op_sub(v2, 1);
          const float v4 = (float)v3;
          const float v7 = op_mul(v4, s6);
          const float v8 = op_add(v1, v7);
          const float v19 = op_where(s18, (float)D_NAN, v8);
          y_0[j] = v19;
        }
        store4<READY>(xs, o + l, m - l, y_0);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((incoming + 4ll), 2) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
  }
}
