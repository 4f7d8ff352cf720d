extern "C" __global__ void __launch_bounds__(256) feed_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, u8* __restrict__ out, const i64* at, const double* st, u64 seed, u64 base_step, const u64* tick, float scale, int back, i64* used, float* __restrict__ a_residual) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  XT* const xs = x + table[5 * p];
  float* const s_residual = a_residual + table[5 * p + 4];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const float s3 = scale;
  u8* const payload = out + at[p];
  const i64 s10 = op_add(n, 1023ll);
  const i64 s11 = s10 / 1024ll;
  const i64 s12 = op_mul(s11, 4ll);
  const i64 s13 = op_add(0ll, s12);
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  __shared__ u8 codes[1][8192];
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const bool whole = READY || __all_sync(FULL, m == 0 || m == 1024);
    const int c = 0;
    float r_xs[32];
    #pragma unroll
    for (int k = 0; k < 8; ++k) load4<READY>(xs, o + (c * 8 + k) * 128 + 4 * u, m - ((c * 8 + k) * 128 + 4 * u), r_xs + 4 * k);
    float r_s_residual[32];
    #pragma unroll
    for (int k = 0; k < 8; ++k) load4<READY>(s_residual, o + (c * 8 + k) * 128 + 4 * u, m - ((c * 8 + k) * 128 + 4 * u), r_s_residual + 4 * k);
    float a1[4];
    u32 w_negative[1] = {};
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v2 = r_xs[4 * row + j];
          const float v4 = op_mul(v2, s3);
          const float v5 = r_s_residual[4 * row + j];
          const float v6 = op_add(v4, v5);
          const float v7 = op_abs(v6);
          const bool v8 = v6 < (float)0.0;
          const i32 v9 = op_code(v8, 1);
          a1[j] = k ? a1[j] + (i < m ? v7 : 0.0f) : i < m ? v7 : 0.0f;
          if (whole) w_negative[0] |= (u32)v9 << (8 * j + 1 * k);
          else if (i < m) codes[0][team * 1024 + i] = (u8)v9;
        }
      }
    }
    if (whole) {
      #pragma unroll
      for (int q = 0; q < 1; ++q) if (m) store_codes<READY>((payload + s13) + t * 128 + 4 * u, w_negative[q]);
    }
    else
    {
      __syncwarp();
      pack_short<1>(codes[0] + team * 1024, (payload + s13) + t * 128, m, u, 32);
    }
    const float v14 = team_sum<32>(a1[0], a1[1], a1[2], a1[3]);
    const float v15 = (float)m;
    const float v16 = v14 / v15;
    if (m && u == 0) store_float32<READY>((payload + 0ll) + t * 4, (float)v16);
    const float v17 = op_neg(v16);
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        float y_2[4];
        float y_3[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v18 = r_xs[4 * row + j];
          const float v19 = op_mul(v18, s3);
          const float v20 = r_s_residual[4 * row + j];
          const float v21 = op_add(v19, v20);
          const bool v22 = v21 < (float)0.0;
          const i32 v23 = op_code(v22, 1);
          const bool v24 = v23 != 0;
          const float v25 = op_where(v24, v17, v16);
          const float v26 = op_sub(v21, v25);
          y_2[j] = v26;
          y_3[j] = v25;
        }
        keep4<READY>(s_residual, o + l, m - l, y_2);
        if (back) store4<READY>(xs, o + l, m - l, y_3);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned(s_residual, 4 * sizeof(*s_residual)) && aligned((payload + 0ll), 4) && aligned((payload + s13), 2) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
}
extern "C" __global__ void __launch_bounds__(256) decode_set_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, const u8* __restrict__ data, const i64* at_in, const i64* used_in, const double* st, u64 base_step, const u64* tick, u32* errors, int payloads) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const u8* const incoming = data + at_in[p];
  const i64 s3 = op_add(n, 1023ll);
  const i64 s4 = s3 / 1024ll;
  const i64 s5 = op_mul(s4, 4ll);
  const i64 s6 = op_add(0ll, s5);
  XT* const xs = x + table[5 * p];
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const int c = 0;
    const float v1 = m ? (float)load_float32<READY>((incoming + 0ll) + t * 4) : (float)0;
    const float v2 = op_neg(v1);
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        u32 q_negative[4];
        if (READY || m == 1024) {
          const u32 word = load_codes<READY>((incoming + s6) + t * 128 + 4 * u);
          for (int e = 0; e < 4; ++e) q_negative[e] = word >> (8 * e + 1 * k) & 1u;
        }
        else
        for (int e = 0; e < 4; ++e) q_negative[e] = l + e < m ? code_at<1>((incoming + s6) + t * 128, m, l + e) : 0;
        float y_0[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const i32 v7 = (i32)q_negative[j];
          const bool v8 = v7 != 0;
          const float v9 = op_where(v8, v2, v1);
          y_0[j] = v9;
        }
        store4<READY>(xs, o + l, m - l, y_0);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((incoming + s6), 2) && aligned((incoming + 0ll), 4) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
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
  const i64 s3 = op_add(n, 1023ll);
  const i64 s4 = s3 / 1024ll;
  const i64 s5 = op_mul(s4, 4ll);
  const i64 s6 = op_add(0ll, s5);
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const int c = 0;
    float r_xs[32];
    #pragma unroll
    for (int k = 0; k < 8; ++k) load4<READY>(xs, o + (c * 8 + k) * 128 + 4 * u, m - ((c * 8 + k) * 128 + 4 * u), r_xs + 4 * k);
    const float v1 = m ? (float)load_float32<READY>((incoming + 0ll) + t * 4) : (float)0;
    const float v2 = op_neg(v1);
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        u32 q_negative[4];
        if (READY || m == 1024) {
          const u32 word = load_codes<READY>((incoming + s6) + t * 128 + 4 * u);
          for (int e = 0; e < 4; ++e) q_negative[e] = word >> (8 * e + 1 * k) & 1u;
        }
        else
        for (int e = 0; e < 4; ++e) q_negative[e] = l + e < m ? code_at<1>((incoming + s6) + t * 128, m, l + e) : 0;
        float y_0[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v7 = r_xs[4 * row + j];
          const i32 v8 = (i32)q_negative[j];
          const bool v9 = v8 != 0;
          const float v10 = op_where(v9, v2, v1);
          const float v11 = op_add(v7, v10);
          y_0[j] = v11;
        }
        store4<READY>(xs, o + l, m - l, y_0);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((incoming + s6), 2) && aligned((incoming + 0ll), 4) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
  }
}
extern "C" __global__ void __launch_bounds__(256) encode_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, u8* __restrict__ out, const i64* at, const double* st, u64 seed, u64 base_step, const u64* tick, float scale, int back, i64* used) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  XT* const xs = x + table[5 * p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const float s3 = scale;
  u8* const payload = out + at[p];
  const i64 s8 = op_add(n, 1023ll);
  const i64 s9 = s8 / 1024ll;
  const i64 s10 = op_mul(s9, 4ll);
  const i64 s11 = op_add(0ll, s10);
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  __shared__ u8 codes[1][8192];
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const bool whole = READY || __all_sync(FULL, m == 0 || m == 1024);
    const int c = 0;
    float r_xs[32];
    #pragma unroll
    for (int k = 0; k < 8; ++k) load4<READY>(xs, o + (c * 8 + k) * 128 + 4 * u, m - ((c * 8 + k) * 128 + 4 * u), r_xs + 4 * k);
    float a1[4];
    u32 w_negative[1] = {};
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v2 = r_xs[4 * row + j];
          const float v4 = op_mul(v2, s3);
          const float v5 = op_abs(v4);
          const bool v6 = v4 < (float)0.0;
          const i32 v7 = op_code(v6, 1);
          a1[j] = k ? a1[j] + (i < m ? v5 : 0.0f) : i < m ? v5 : 0.0f;
          if (whole) w_negative[0] |= (u32)v7 << (8 * j + 1 * k);
          else if (i < m) codes[0][team * 1024 + i] = (u8)v7;
        }
      }
    }
    if (whole) {
      #pragma unroll
      for (int q = 0; q < 1; ++q) if (m) store_codes<READY>((payload + s11) + t * 128 + 4 * u, w_negative[q]);
    }
    else
    {
      __syncwarp();
      pack_short<1>(codes[0] + team * 1024, (payload + s11) + t * 128, m, u, 32);
    }
    const float v12 = team_sum<32>(a1[0], a1[1], a1[2], a1[3]);
    const float v13 = (float)m;
    const float v14 = v12 / v13;
    if (m && u == 0) store_float32<READY>((payload + 0ll) + t * 4, (float)v14);
    const float v15 = op_neg(v14);
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        float y_2[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v16 = r_xs[4 * row + j];
          const float v17 = op_mul(v16, s3);
          const bool v18 = v17 < (float)0.0;
          const i32 v19 = op_code(v18, 1);
          const bool v20 = v19 != 0;
          const float v21 = op_where(v20, v15, v14);
          y_2[j] = v21;
        }
        if (back) store4<READY>(xs, o + l, m - l, y_2);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((payload + 0ll), 4) && aligned((payload + s11), 2) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
}
