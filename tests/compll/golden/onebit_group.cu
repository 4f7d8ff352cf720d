extern "C" __global__ void __launch_bounds__(256) feed_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, u8* __restrict__ out, const i64* at, const double* st, u64 seed, u64 base_step, const u64* tick, float scale, int back, i64* used, float* __restrict__ a_residual) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  XT* const xs = x + table[5 * p];
  float* const s_residual = a_residual + table[5 * p + 4];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const float s3 = scale;
  const i64 out_at0 = at[p] + 0;
  const i64 out_at1 = out_at0 + (n + 1023) / 1024 * 4;
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
      for (int q = 0; q < 1; ++q) if (m) store_codes<READY>((out + out_at1) + t * 128 + 4 * u, w_negative[q]);
    }
    else
    {
      __syncwarp();
      pack_short<1>(codes[0] + team * 1024, (out + out_at1) + t * 128, m, u, 32);
    }
    const float v10 = team_sum<32>(a1[0], a1[1], a1[2], a1[3]);
    const float v11 = (float)m;
    const float v12 = v10 / v11;
    if (m && u == 0) store_float32<READY>((out + out_at0) + t * 4, (float)v12);
    const float v13 = op_neg(v12);
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        float y_2[4];
        float y_3[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v14 = r_xs[4 * row + j];
          const float v15 = op_mul(v14, s3);
          const float v16 = r_s_residual[4 * row + j];
          const float v17 = op_add(v15, v16);
          const bool v18 = v17 < (float)0.0;
          const i32 v19 = op_code(v18, 1);
          const bool v20 = v19 != 0;
          const float v21 = op_where(v20, v13, v12);
          const float v22 = op_sub(v17, v21);
          y_2[j] = v22;
          y_3[j] = v21;
        }
        keep4<READY>(s_residual, o + l, m - l, y_2);
        if (back) store4<READY>(xs, o + l, m - l, y_3);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned(s_residual, 4 * sizeof(*s_residual)) && aligned((out + out_at0), 4) && aligned((out + out_at1), 2) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
}
extern "C" __global__ void __launch_bounds__(256) decode_set_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, const u8* __restrict__ data, const i64* at_in, const i64* used_in, const double* st, u64 base_step, const u64* tick, u32* errors, int payloads) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const i64 in_at0 = at_in[p] + 0;
  const i64 in_at1 = in_at0 + (n + 1023) / 1024 * 4;
  XT* const xs = x + table[5 * p];
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const int c = 0;
    const float v1 = m ? (float)load_float32<READY>((data + in_at0) + t * 4) : (float)0;
    const float v2 = op_neg(v1);
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        u32 q_negative[4];
        if (READY || m == 1024) {
          const u32 word = load_codes<READY>((data + in_at1) + t * 128 + 4 * u);
          for (int e = 0; e < 4; ++e) q_negative[e] = word >> (8 * e + 1 * k) & 1u;
        }
        else
        for (int e = 0; e < 4; ++e) q_negative[e] = l + e < m ? code_at<1>((data + in_at1) + t * 128, m, l + e) : 0;
        float y_0[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const i32 v3 = (i32)q_negative[j];
          const bool v4 = v3 != 0;
          const float v5 = op_where(v4, v2, v1);
          y_0[j] = v5;
        }
        store4<READY>(xs, o + l, m - l, y_0);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((data + in_at1), 2) && aligned((data + in_at0), 4) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
}
extern "C" __global__ void __launch_bounds__(256) decode_add_walk0(XT* __restrict__ x, const i64* table, const i64* first, const i64* item_at, int pieces, const u8* __restrict__ data, const i64* at_in, const i64* used_in, const double* st, u64 base_step, const u64* tick, u32* errors, int payloads) {
  const i64* const firsts = first + 0 * (pieces + 1);
  const int p = find(firsts, pieces, blockIdx.x);
  const i64 own = (i64)blockIdx.x - firsts[p];
  for (int q = 0; q < payloads; ++q, at_in += pieces) {
  XT* const xs = x + table[5 * p];
  const i64 n = table[5 * p + 1];
  const i64 size = n;
  const i64 in_at0 = at_in[p] + 0;
  const i64 in_at1 = in_at0 + (n + 1023) / 1024 * 4;
  const int u = threadIdx.x % 32, team = threadIdx.x / 32;
  const i64 t = own * 8 + team, o = t * 1024;
  const auto tile = [&](auto ready) {
    constexpr bool READY = decltype(ready)::value;
    const int m = READY || size - o >= 1024 ? 1024 : size > o ? (int)(size - o) : 0;
    const int c = 0;
    float r_xs[32];
    #pragma unroll
    for (int k = 0; k < 8; ++k) load4<READY>(xs, o + (c * 8 + k) * 128 + 4 * u, m - ((c * 8 + k) * 128 + 4 * u), r_xs + 4 * k);
    const float v1 = m ? (float)load_float32<READY>((data + in_at0) + t * 4) : (float)0;
    const float v2 = op_neg(v1);
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        u32 q_negative[4];
        if (READY || m == 1024) {
          const u32 word = load_codes<READY>((data + in_at1) + t * 128 + 4 * u);
          for (int e = 0; e < 4; ++e) q_negative[e] = word >> (8 * e + 1 * k) & 1u;
        }
        else
        for (int e = 0; e < 4; ++e) q_negative[e] = l + e < m ? code_at<1>((data + in_at1) + t * 128, m, l + e) : 0;
        float y_0[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v3 = r_xs[4 * row + j];
          const i32 v4 = (i32)q_negative[j];
          const bool v5 = v4 != 0;
          const float v6 = op_where(v5, v2, v1);
          const float v7 = op_add(v3, v6);
          y_0[j] = v7;
        }
        store4<READY>(xs, o + l, m - l, y_0);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((data + in_at1), 2) && aligned((data + in_at0), 4) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
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
  const i64 out_at0 = at[p] + 0;
  const i64 out_at1 = out_at0 + (n + 1023) / 1024 * 4;
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
      for (int q = 0; q < 1; ++q) if (m) store_codes<READY>((out + out_at1) + t * 128 + 4 * u, w_negative[q]);
    }
    else
    {
      __syncwarp();
      pack_short<1>(codes[0] + team * 1024, (out + out_at1) + t * 128, m, u, 32);
    }
    const float v8 = team_sum<32>(a1[0], a1[1], a1[2], a1[3]);
    const float v9 = (float)m;
    const float v10 = v8 / v9;
    if (m && u == 0) store_float32<READY>((out + out_at0) + t * 4, (float)v10);
    const float v11 = op_neg(v10);
    {
      #pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int k = c * 8 + row, l = k * 128 + 4 * u;
        float y_2[4];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = l + j;
          const float v12 = r_xs[4 * row + j];
          const float v13 = op_mul(v12, s3);
          const bool v14 = v13 < (float)0.0;
          const i32 v15 = op_code(v14, 1);
          const bool v16 = v15 != 0;
          const float v17 = op_where(v16, v11, v10);
          y_2[j] = v17;
        }
        if (back) store4<READY>(xs, o + l, m - l, y_2);
      }
    }
  };
  if (aligned(xs, 4 * sizeof(*xs)) && aligned((out + out_at0), 4) && aligned((out + out_at1), 2) && __all_sync(FULL, size - o >= 1024)) tile(Ready<true>()); else tile(Ready<false>());
}
