// Functions for generated CUDA kernels.
//
// A *team* of T threads of one warp owns a tile. Thread u holds the elements k * 4T + 4u + j of row
// k, j = 0..3: 16-byte accesses, and whole bytes of [Note: packing]. Sums add rows in order, or
// fold them in halves if a row is shorter than the lanes of [Note: order of sums]. All threads of a warp
// take part in every collective; a team without a tile has m = 0 elements.

// gradients and outputs: GRADIENT is 0 float32, 1 float16, 2 bfloat16
#if GRADIENT == 0
typedef float XT;
#else
typedef u16 XT;
#endif

// ---- random draws: [Note: random draws] in draws.py ----

// the keys of a stream for a block's elements, which begin at e: two highs at most
D void block_keys(i64* keys, i64 seed, i64 step, i64 tensor, i64 draw, i64 e) {
  if (threadIdx.x < 2) keys[threadIdx.x] = stream(seed, step, tensor, draw, (e >> 32) + threadIdx.x);
}

// ---- memory: payload fields may begin at any byte ----

// [Note: ready tiles] What a team does with a tile is compiled twice: for a tile that is READY, with
// all of its elements there, at addresses where four can be accessed at once; and for any other. In
// the first there are neither branches nor calls between the accesses, so that they are issued
// together: half the instructions and registers of code that asks at each of them.
template <bool READY> struct Ready { static constexpr bool value = READY; };

D bool aligned(const void* p, u32 bytes) { return ((u64)p & (bytes - 1)) == 0; }
// Values at odd addresses are accessed byte by byte, out of line: that is rare, and would be most of the
// code. Values are passed in registers; otherwise their arrays would be in memory.
SLOW void store_bytes(u8* p, u32 value, int count) {
  if (count == 4 && aligned(p, 2)) {
    for (int i = 0; i < 2; ++i) ((u16*)p)[i] = (u16)(value >> (16 * i));
    return;
  }
  for (int i = 0; i < count; ++i) p[i] = (u8)(value >> (8 * i));
}
SLOW u32 load_bytes(const u8* p, int count) {
  if (count == 4 && aligned(p, 2)) return ((const u16*)p)[0] | (u32)((const u16*)p)[1] << 16;
  u32 value = 0;
  for (int i = 0; i < count; ++i) value |= (u32)p[i] << (8 * i);
  return value;
}
template <bool READY = false> D void store_word(u8* p, u32 value) {
  if (READY || aligned(p, 4)) *(u32*)p = value; else store_bytes(p, value, 4);
}
template <bool READY = false> D u32 load_word(const u8* p) {
  return READY || aligned(p, 4) ? *(const u32*)p : load_bytes(p, 4);
}
// four bytes of codes; in a ready tile, they begin at an even address
template <bool READY> D void store_codes(u8* p, u32 value) {
  if (!READY || aligned(p, 4)) { store_word<READY>(p, value); return; }
  ((u16*)p)[0] = (u16)value;
  ((u16*)p)[1] = (u16)(value >> 16);
}
template <bool READY> D u32 load_codes(const u8* p) {
  if (!READY || aligned(p, 4)) return load_word<READY>(p);
  return ((const u16*)p)[0] | (u32)((const u16*)p)[1] << 16;
}
template <bool READY = false> D void store_half(u8* p, u16 value) {
  if (READY || aligned(p, 2)) *(u16*)p = value; else store_bytes(p, value, 2);
}
template <bool READY = false> D u16 load_half(const u8* p) {
  return READY || aligned(p, 2) ? *(const u16*)p : (u16)load_bytes(p, 2);
}

#define R template <bool READY = false> D
R void store_uint32(u8* p, i64 value) { store_word<READY>(p, (u32)value); }
R void store_int32(u8* p, i64 value) { store_word<READY>(p, (u32)value); }
R void store_byte(u8* p, i64 value) { *p = (u8)value; }
R void store_uint16(u8* p, i64 value) { store_half<READY>(p, (u16)value); }
R void store_float32(u8* p, float value) { store_word<READY>(p, (u32)__float_as_int(value)); }
R i64 load_uint32(const u8* p) { return (i64)load_word<READY>(p); }
R i64 load_int32(const u8* p) { return (i64)(i32)load_word<READY>(p); }
R i64 load_byte(const u8* p) { return (i64)*p; }
R i64 load_uint16(const u8* p) { return (i64)load_half<READY>(p); }
R float load_float32(const u8* p) { return __int_as_float((i32)load_word<READY>(p)); }
#undef R
// true if position i in a payload is in the tensor of n elements, and above the one before
D bool ascends(const u8* positions, i64 i, i64 count, i64 n) {
  if (i >= count) return true;
  const u32 own = (u32)load_uint32(positions + 4 * i);
  return (i64)own < n && (i == 0 || (u32)load_uint32(positions + 4 * (i - 1)) < own);
}

struct alignas(16) Quad { u32 v[4]; };
struct alignas(8) Pair { u32 v[2]; };

D Quad quad_of(const float* v) {
  Quad q;
  for (int j = 0; j < 4; ++j) q.v[j] = (u32)__float_as_int(v[j]);
  return q;
}
// four elements at i of n (zero beyond)
template <bool READY> D void load4(const float* x, i64 i, int count, float* v) {
  if (!READY) {
    for (int j = 0; j < 4; ++j) v[j] = j < count ? x[i + j] : 0.0f;
    return;
  }
  const Quad q = *(const Quad*)(x + i);
  for (int j = 0; j < 4; ++j) v[j] = __int_as_float((i32)q.v[j]);
}
template <bool READY> D void load4(const i32* x, i64 i, int count, i32* v) {
  if (!READY) {
    for (int j = 0; j < 4; ++j) v[j] = j < count ? x[i + j] : 0;
    return;
  }
  const Quad q = *(const Quad*)(x + i);
  for (int j = 0; j < 4; ++j) v[j] = (i32)q.v[j];
}
template <bool READY> D void store4(i32* x, i64 i, int count, const i32* v) {
  if (!READY) {
    for (int j = 0; j < 4; ++j) if (j < count) x[i + j] = v[j];
    return;
  }
  Quad q;
  for (int j = 0; j < 4; ++j) q.v[j] = (u32)v[j];
  *(Quad*)(x + i) = q;
}
template <bool READY> D void store4(float* x, i64 i, int count, const float* v) {
  if (READY) *(Quad*)(x + i) = quad_of(v);
  else for (int j = 0; j < 4; ++j) if (j < count) x[i + j] = v[j];
}
// states take up finite values only; a sum that overflows takes the long way, no more
template <bool READY> D void keep4(float* x, i64 i, int count, const float* v) {
  if (READY && op_isfinite((fabsf(v[0]) + fabsf(v[1])) + (fabsf(v[2]) + fabsf(v[3])))) *(Quad*)(x + i) = quad_of(v);
  else for (int j = 0; j < 4; ++j) if (j < count && op_isfinite(v[j])) x[i + j] = v[j];
}
#if GRADIENT != 0
D float value16(u16 h) { return GRADIENT == 1 ? float16_value(h) : bfloat16_value(h); }
D u16 bits16(float x) { return GRADIENT == 1 ? float16_bits(x) : bfloat16_bits(x); }
template <bool READY> D void load4(const u16* x, i64 i, int count, float* v) {
  if (!READY) {
    for (int j = 0; j < 4; ++j) v[j] = j < count ? value16(x[i + j]) : 0.0f;
    return;
  }
  const Pair q = *(const Pair*)(x + i);
  for (int j = 0; j < 4; ++j) v[j] = value16((u16)(q.v[j >> 1] >> (16 * (j & 1))));
}
template <bool READY> D void store4(u16* x, i64 i, int count, const float* v) {
  if (!READY) {
    for (int j = 0; j < 4; ++j) if (j < count) x[i + j] = bits16(v[j]);
    return;
  }
  Pair q;
  for (int j = 0; j < 2; ++j) q.v[j] = bits16(v[2 * j]) | (u32)bits16(v[2 * j + 1]) << 16;
  *(Pair*)(x + i) = q;
}
#endif
D float load1(const float* x, i64 i) { return x[i]; }
D void store1(float* x, i64 i, float v) { x[i] = v; }
D i32 load1(const i32* x, i64 i) { return x[i]; }
D void keep1(float* x, i64 i, float v) { if (op_isfinite(v)) x[i] = v; }
#if GRADIENT != 0
D float load1(const u16* x, i64 i) { return value16(x[i]); }
D void store1(u16* x, i64 i, float v) { x[i] = bits16(v); }
#endif

// four items of 2 or 4 bytes in the payload
SLOW void put4_slow(u8* p, int count, int bytes, Quad q) {
  for (int j = 0; j < 4; ++j)
    if (j < count) {
      if (bytes == 4) store_word(p + 4 * j, q.v[j]);
      else if (bytes == 2) store_half(p + 2 * j, (u16)q.v[j]);
      else p[j] = (u8)q.v[j];
    }
}
SLOW Quad get4_slow(const u8* p, int count, int bytes) {
  Quad q;
  for (int j = 0; j < 4; ++j)
    q.v[j] = j >= count ? 0 : bytes == 4 ? load_word(p + 4 * j) : bytes == 2 ? load_half(p + 2 * j) : p[j];
  return q;
}
template <bool READY> D void put4(u8* p, int count, int bytes, const u32* v) {
  Quad q;
  for (int j = 0; j < 4; ++j) q.v[j] = v[j];
  if (!READY) { put4_slow(p, count, bytes, q); return; }
  if (bytes == 4) { *(Quad*)p = q; return; }
  if (bytes == 1) { *(u32*)p = v[0] | v[1] << 8 | v[2] << 16 | v[3] << 24; return; }
  Pair half;
  for (int j = 0; j < 2; ++j) half.v[j] = v[2 * j] | v[2 * j + 1] << 16;
  *(Pair*)p = half;
}
template <bool READY> D void get4(const u8* p, int count, int bytes, u32* v) {
  Quad q;
  if (!READY) {
    q = get4_slow(p, count, bytes);
  } else if (bytes == 4) {
    q = *(const Quad*)p;
  } else if (bytes == 1) {
    for (int j = 0; j < 4; ++j) q.v[j] = *(const u32*)p >> (8 * j) & 0xffu;
  } else {
    const Pair half = *(const Pair*)p;
    for (int j = 0; j < 4; ++j) q.v[j] = (half.v[j >> 1] >> (16 * (j & 1))) & 0xffffu;
  }
  for (int j = 0; j < 4; ++j) v[j] = q.v[j];
}

// ---- rows of small tiles ----

// [Note: rows of small tiles] A thread's four elements of a row are next to those of its team alone: a
// warp would access 16 or 32 bytes of many tiles at a time, and the memory takes as many requests as for
// four times the bytes. So the warp accesses its ready tiles in the order of memory, and hands over in
// shared memory, quad q of the warp in slot q ^ (q / 8 % 4) * T, which keeps threads off each other's banks.
template <int T, int ROWS> struct Exchange {
  Quad* const warp;
  const int lane, lane_slot, base, turn;
  __device__ __forceinline__ Exchange(Quad* shared)
      : warp(shared + threadIdx.x / 32 * 32 * ROWS), lane(threadIdx.x % 32),
        lane_slot(lane ^ lane / 8 % 4 * T), base(lane / T * T * ROWS), turn(base / 8 % 4 * T) {}
  __device__ __forceinline__ Quad& in_memory(int i) const { return warp[32 * i + lane_slot]; }
  __device__ __forceinline__ Quad& own(int k) const { return warp[(base + T * k + lane % T) ^ turn]; }
  // the warp's first quad, and this thread's, of an array at its tile
  template <class X> __device__ __forceinline__ X* first(X* tile) const { return tile - 4 * base + 4 * lane; }
};
template <bool READY, int T, int ROWS, class X, class V> D void load_rows(const X* x, i64 o, int m, V* v, Quad* shared) {
  if constexpr (READY && sizeof(X) == 4) {
    const Exchange<T, ROWS> e(shared);
    const X* const first = e.first(x + o);
    Quad q[ROWS];
    for (int i = 0; i < ROWS; ++i) q[i] = *(const Quad*)(first + 128 * i);
    __syncwarp();  // the last exchange has been read
    for (int i = 0; i < ROWS; ++i) e.in_memory(i) = q[i];
    __syncwarp();
    for (int k = 0; k < ROWS; ++k) load4<true>((const V*)&e.own(k), 0, 4, v + 4 * k);
  } else {
    for (int k = 0; k < ROWS; ++k) {
      const int l = (k * T + (int)threadIdx.x % T) * 4;
      load4<READY>(x, o + l, m - l, v + 4 * k);
    }
  }
}
// A row is put in shared memory, and all of them are stored after the last one.
template <bool READY, int T, int ROWS, class X, class V> D void put_row(X* x, i64 o, int m, int k, const V* v, Quad* shared) {
  const int l = (k * T + (int)threadIdx.x % T) * 4;
  if constexpr (READY && sizeof(X) == 4) store4<true>((V*)&Exchange<T, ROWS>(shared).own(k), 0, 4, v);
  else store4<READY>(x, o + l, m - l, v);
}
template <bool READY, int T, int ROWS, class X> D void store_rows(X* x, i64 o, Quad* shared) {
  if constexpr (READY && sizeof(X) == 4) {
    const Exchange<T, ROWS> e(shared);
    X* const first = e.first(x + o);
    __syncwarp();
    for (int i = 0; i < ROWS; ++i) *(Quad*)(first + 128 * i) = e.in_memory(i);
  }
}
// the same for a state; `sum` is finite while all values are
template <bool READY, int T, int ROWS, class X> D void put_kept(X* x, i64 o, int m, int k, const float* v, float& sum, Quad* shared) {
  const int l = (k * T + (int)threadIdx.x % T) * 4;
  if constexpr (READY && sizeof(X) == 4) {
    sum += (fabsf(v[0]) + fabsf(v[1])) + (fabsf(v[2]) + fabsf(v[3]));
    put_row<true, T, ROWS>(x, o, m, k, v, shared);
  } else {
    keep4<READY>(x, o + l, m - l, v);
  }
}
template <bool READY, int T, int ROWS, class X> D void keep_rows(X* x, i64 o, int m, float sum, Quad* shared) {
  if constexpr (READY && sizeof(X) == 4) {
    if (__all_sync(FULL, op_isfinite(sum))) { store_rows<true, T, ROWS>(x, o, shared); return; }
    for (int k = 0; k < ROWS; ++k) {
      const int l = (k * T + (int)threadIdx.x % T) * 4;
      float v[4];
      load4<true>((const float*)&Exchange<T, ROWS>(shared).own(k), 0, 4, v);
      keep4<false>(x, o + l, 4, v);
    }
  }
}

// ---- pieces and tiles ----

// the piece of a block: first[p] <= block < first[p + 1]
D int find(const i64* first, int pieces, i64 block) {
  int low = 0, high = pieces;
  while (high - low > 1) {
    int mid = (low + high) / 2;
    if (first[mid] <= block) low = mid; else high = mid;
  }
  return low;
}

// ---- sums and extremes over a team ----

// Of the sums of four lanes, a thread goes on with half of them at each of the first two steps: in the
// same order, with less than half the shuffles.
template <int T> D float team_sum(float a, float b, float c, float d) {
  if constexpr (T == 1) return (a + c) + (b + d);
  const bool upper = threadIdx.x & (T / 2);
  float x = upper ? c : a, y = upper ? d : b;
  x += __shfl_xor_sync(FULL, upper ? a : c, T / 2, T);
  y += __shfl_xor_sync(FULL, upper ? b : d, T / 2, T);
  if constexpr (T == 2) return (x + __shfl_xor_sync(FULL, x, 1, 2)) + (y + __shfl_xor_sync(FULL, y, 1, 2));
  const bool second = threadIdx.x & (T / 4);
  float sum = second ? y : x;
  sum += __shfl_xor_sync(FULL, second ? x : y, T / 4, T);
  for (int h = T / 8; h > 0; h >>= 1) sum += __shfl_xor_sync(FULL, sum, h, T);
  sum += __shfl_xor_sync(FULL, sum, T / 2, T);  // a + c, and b + d
  return sum + __shfl_xor_sync(FULL, sum, T / 4, T);
}
#if __CUDA_ARCH__ >= 800  // an instruction for a whole warp
#define WHOLE_WARP(text) if constexpr (T == 32) return text;
#else
#define WHOLE_WARP(text)
#endif
template <int T> D i32 team_max(i32 v) {
  WHOLE_WARP(__reduce_max_sync(FULL, v))
  for (int h = T / 2; h > 0; h >>= 1) v = op_max(v, __shfl_xor_sync(FULL, v, h, T));
  return v;
}
template <int T> D i32 team_min(i32 v) {
  WHOLE_WARP(__reduce_min_sync(FULL, v))
  for (int h = T / 2; h > 0; h >>= 1) v = op_min(v, __shfl_xor_sync(FULL, v, h, T));
  return v;
}
template <int T> D i32 team_total(i32 v) {
  WHOLE_WARP((i32)__reduce_add_sync(FULL, (u32)v))
  for (int h = T / 2; h > 0; h >>= 1) v += __shfl_xor_sync(FULL, v, h, T);
  return v;
}

// ---- over a block of 256 threads: the parts of one piece ----
// Loads of several parts are under way at once: a block that waits for each takes longer than the walk.

D double block_total(const u32* parts, i64 tiles) {
  __shared__ double lanes[128];
  double sum = 0.0;
  if (threadIdx.x < 128) {
#pragma unroll 16
    for (i64 i = threadIdx.x; i < tiles; i += 128) sum += (double)__int_as_float((i32)parts[i]);
    lanes[threadIdx.x] = sum;
  }
  for (int h = 64; h > 0; h >>= 1) {
    __syncthreads();
    if ((int)threadIdx.x < h) lanes[threadIdx.x] += lanes[threadIdx.x + h];
  }
  __syncthreads();
  const double result = lanes[0];
  __syncthreads();
  return result;
}
// joins integers, in any order; `join` combines two
template <class T, class JOIN> D T block_join(const u32* parts, i64 count, T start, JOIN join) {
  __shared__ T lanes[256];
  T own = start;
#pragma unroll 16
  for (i64 i = threadIdx.x; i < count; i += 256) own = join(own, (T)(i32)parts[i]);
  lanes[threadIdx.x] = own;
  for (int h = 128; h > 0; h >>= 1) {
    __syncthreads();
    if ((int)threadIdx.x < h) lanes[threadIdx.x] = join(lanes[threadIdx.x], lanes[threadIdx.x + h]);
  }
  __syncthreads();
  own = lanes[0];
  __syncthreads();
  return own;
}
D i32 block_extreme(const u32* parts, i64 count, bool largest) {
  return block_join(parts, count, largest ? -2147483647 : 2147483647, [=](i32 a, i32 b) { return largest ? op_max(a, b) : op_min(a, b); });
}
D i64 block_count(const u32* parts, i64 count) {
  return block_join(parts, count, 0ll, [](i64 a, i64 b) { return a + b; });
}

// ---- numbers that one kernel leaves for others ----

D u64 slot_of(double x) { return (u64)__double_as_longlong(x); }
D u64 slot_of(float x) { return (u64)(u32)__float_as_int(x); }
D u64 slot_of(i64 x) { return (u64)x; }
D u64 slot_of(i32 x) { return (u64)(u32)x; }
D u64 slot_of(bool x) { return x; }
D void take(u64 slot, double& x) { x = __longlong_as_double((i64)slot); }
D void take(u64 slot, float& x) { x = __int_as_float((i32)slot); }
D void take(u64 slot, i64& x) { x = (i64)slot; }
D void take(u64 slot, i32& x) { x = (i32)slot; }
D void take(u64 slot, bool& x) { x = slot != 0; }
template <class T> D T held(u64 slot) {
  T x;
  take(slot, x);
  return x;
}

// ---- packing ----

// Pack a tile of m codes (a byte each, in shared memory) byte by byte: short tiles.
template <int BITS> D void pack_short(const u8* codes, u8* out, int m, int u, int team) {
  int width = (m * BITS + 7) / 8;
  for (int b = u; b < width; b += team) {
    u32 byte = 0;
    for (int p = 0; p < 8 / BITS; ++p)
      if (b + p * width < m) byte |= (u32)codes[b + p * width] << (p * BITS);
    out[b] = (u8)byte;
  }
}
template <int BITS> D u32 code_at(const u8* data, int m, int i) {
  int width = (m * BITS + 7) / 8;
  return ((u32)data[i % width] >> ((i / width) * BITS)) & ((1u << BITS) - 1u);
}

// [Note: trits] in trits.py: a tile of m codes (a byte each, in shared memory)
D void pack_trits(const u8* codes, u8* out, int m, int u, int team) {
  const int width = (m + 4) / 5;
  for (int b = u; b < width; b += team) {
    u32 byte = 0;
    for (int p = 0; p < 5; ++p) byte = 3 * byte + (b + p * width < m ? codes[b + p * width] : 1);
    out[b] = (u8)byte;
  }
}
// A byte as a fraction of 3**5, of 2**32 parts: the whole part of three times it is a digit, the
// first one first, and the fraction holds the others.
D u32 trits_of(u32 byte) { return byte * 17674763u; }
D u32 trit_at(const u8* data, int m, int i) {
  const int width = (m + 4) / 5, digit = i / width;
  const u32 weight = (u32)(0x511b090301ull >> (8 * digit)) & 255u;  // 3**digit
  return (u32)((u64)(trits_of(data[i - digit * width]) * weight) * 3u >> 32);
}

// ---- selection ----

// exclusive prefix sum over the threads of a block; the sum of all in *sum
template <int THREADS> D i64 block_scan(i64 value, i64* sum) {
  __shared__ i64 warps[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 inclusive = value;
  for (int h = 1; h < 32; h *= 2) {
    i64 below = __shfl_up_sync(FULL, inclusive, h, 32);
    if (lane >= h) inclusive += below;
  }
  if (lane == 31) warps[warp] = inclusive;
  __syncthreads();
  i64 before = 0, all = 0;
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) before += warps[w];
    all += warps[w];
  }
  __syncthreads();
  *sum = all;
  return before + inclusive - value;
}
// counts become exclusive prefix sums; returns the sum of all. 256 threads.
template <class T> D i64 scan_array(T* counts, i64 length) {
  i64 before = 0;
  for (i64 o = 0; o < length; o += 256 * 8) {
    const i64 i = o + threadIdx.x * 8;
    i64 own = 0, all;
    T held[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) own += (i64)(held[k] = i + k < length ? counts[i + k] : (T)0);
    i64 at = before + block_scan<256>(own, &all);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (i + k < length) {
        counts[i + k] = (T)at;
        at += (i64)held[k];
      }
    before += all;
  }
  return before;
}
// Of the four elements that a thread of a team has in a row, which number each hit has; `next`: that of
// the row's first, then of the next row's.
template <int T> D void ranks(const bool* hit, i64& next, i64* rank) {
  if (!__any_sync(FULL, hit[0] || hit[1] || hit[2] || hit[3])) {
    for (int j = 0; j < 4; ++j) rank[j] = next;
    return;
  }
  const int lane = threadIdx.x % 32;
  const u32 team = T == 32 ? FULL : ((1u << T % 32) - 1u) << lane / T * T, below = (1u << lane) - 1u;
  i64 own = next;
  for (int j = 0; j < 4; ++j) {
    const u32 bits = __ballot_sync(FULL, hit[j]) & team;
    own += __popc(bits & below);
    next += __popc(bits);
  }
  for (int j = 0; j < 4; ++j) {
    rank[j] = own;
    own += hit[j];
  }
}
