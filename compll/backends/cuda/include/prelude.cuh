// Functions for generated CUDA kernels.
//
// A *team* of T threads of one warp owns a tile. Thread u holds the elements k * 4T + 4u + j of row
// k, j = 0..3: 16-byte accesses, and whole bytes of [Note: packing]. Sums add rows in order, or
// fold them in halves if a row is shorter than the lanes of [Note: order of sums]. All threads of a warp
// take part in every collective; a team without a tile has m = 0 elements.

// ---- elements of arrays ----

// 16 bits of a gradient or of a state ([Note: 16-bit states] in halves.py), which convert to float and back
#define HALF(name, format)                                                             \
  struct name {                                                                        \
    u16 word;                                                                          \
    name() = default;                                                                  \
    __device__ __forceinline__ name(float x) : word((u16)format##_bits(x)) {}          \
    __device__ __forceinline__ operator float() const { return format##_value(word); } \
  };
HALF(Float16, float16)
HALF(Bfloat16, bfloat16)
#undef HALF
// four neighbours, which are accessed at once
template <class X> struct alignas(4 * sizeof(X)) Four { X v[4]; };
typedef Four<u32> Quad;

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
template <class W, bool READY = false> D void store_as(u8* p, W value) {
  if (READY || aligned(p, sizeof(W))) *(W*)p = value; else store_bytes(p, value, sizeof(W));
}
template <class W, bool READY = false> D W load_as(const u8* p) {
  return READY || aligned(p, sizeof(W)) ? *(const W*)p : (W)load_bytes(p, sizeof(W));
}
// four bytes of codes; in a ready tile, they begin at an even address
template <bool READY> D void store_codes(u8* p, u32 value) {
  if (!READY || aligned(p, 4)) { store_as<u32, READY>(p, value); return; }
  ((u16*)p)[0] = (u16)value;
  ((u16*)p)[1] = (u16)(value >> 16);
}
template <bool READY> D u32 load_codes(const u8* p) {
  if (!READY || aligned(p, 4)) return load_as<u32, READY>(p);
  return ((const u16*)p)[0] | (u32)((const u16*)p)[1] << 16;
}

#define R template <bool READY = false> D
R void store_uint32(u8* p, i64 value) { store_as<u32, READY>(p, (u32)value); }
R void store_int32(u8* p, i64 value) { store_as<u32, READY>(p, (u32)value); }
R void store_byte(u8* p, i64 value) { *p = (u8)value; }
R void store_uint16(u8* p, i64 value) { store_as<u16, READY>(p, (u16)value); }
R void store_float32(u8* p, float value) { store_as<u32, READY>(p, (u32)__float_as_int(value)); }
R i64 load_uint32(const u8* p) { return (i64)load_as<u32, READY>(p); }
R i64 load_int32(const u8* p) { return (i64)(i32)load_as<u32, READY>(p); }
R i64 load_byte(const u8* p) { return (i64)*p; }
R i64 load_uint16(const u8* p) { return (i64)load_as<u16, READY>(p); }
R float load_float32(const u8* p) { return __int_as_float((i32)load_as<u32, READY>(p)); }
#undef R
// a payload is bad, for a reason of REASONS in launch.py
D void refuse(u32* wrong, u32* errors, u32 why) { *wrong = why; atomicOr(errors, why); }
// true if position i in a payload is in the tensor of n elements, and above the one before
D bool ascends(const u8* positions, i64 i, i64 count, i64 n) {
  if (i >= count) return true;
  const u32 own = (u32)load_uint32(positions + 4 * i);
  return (i64)own < n && (i == 0 || (u32)load_uint32(positions + 4 * (i - 1)) < own);
}

// four elements at i; zeros beyond `count`
template <bool READY, class X, class V> D void load4(const X* x, i64 i, int count, V* v) {
  Four<X> q;
  if (READY) q = *(const Four<X>*)(x + i);
  for (int j = 0; j < 4; ++j) v[j] = READY ? (V)q.v[j] : j < count ? (V)x[i + j] : (V)0;
}
template <class X, class V> D Four<X> four_of(const V* v) {
  Four<X> q;
  for (int j = 0; j < 4; ++j) q.v[j] = (X)v[j];
  return q;
}
template <bool READY, class X, class V> D void store4(X* x, i64 i, int count, const V* v) {
  if (READY) *(Four<X>*)(x + i) = four_of<X>(v);
  else for (int j = 0; j < 4; ++j) if (j < count) x[i + j] = (X)v[j];
}
// states take up values below HUGE only (see bits.py); a sum above it takes the long way, no more
template <class X> D void keep1(X* x, i64 i, float v) {
  const X kept = (X)v;
  if (fabsf((float)kept) < HUGE_STATE) x[i] = kept;
}
D float magnitudes(float a, float b, float c, float d) { return (fabsf(a) + fabsf(b)) + (fabsf(c) + fabsf(d)); }
template <bool READY, class X> D void keep4(X* x, i64 i, int count, const float* v) {
  const Four<X> q = four_of<X>(v);
  if (READY && magnitudes(q.v[0], q.v[1], q.v[2], q.v[3]) < HUGE_STATE) *(Four<X>*)(x + i) = q;
  else for (int j = 0; j < 4; ++j) if (j < count) keep1(x, i + j, q.v[j]);
}

// four items of 1, 2 or 4 bytes in the payload
template <class W> SLOW void put4_slow(u8* p, int count, Quad q) {
  for (int j = 0; j < 4; ++j) if (j < count) store_as<W>(p + sizeof(W) * j, (W)q.v[j]);
}
template <class W> SLOW Quad get4_slow(const u8* p, int count) {
  Quad q;
  for (int j = 0; j < 4; ++j) q.v[j] = j < count ? load_as<W>(p + sizeof(W) * j) : 0;
  return q;
}
template <bool READY, class W> D void put4(u8* p, int count, const u32* v) {
  if (READY) *(Four<W>*)p = four_of<W>(v); else put4_slow<W>(p, count, four_of<u32>(v));
}
template <bool READY, class W> D void get4(const u8* p, int count, u32* v) {
  if (READY) load4<true>((const W*)p, 0, 4, v); else load4<true>(get4_slow<W>(p, count).v, 0, 4, v);
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
// the same for a state; while `sum` is below HUGE, all values are
template <bool READY, int T, int ROWS, class X> D void put_kept(X* x, i64 o, int m, int k, const float* v, float& sum, Quad* shared) {
  const int l = (k * T + (int)threadIdx.x % T) * 4;
  if constexpr (READY && sizeof(X) == 4) {
    sum += magnitudes(v[0], v[1], v[2], v[3]);
    put_row<true, T, ROWS>(x, o, m, k, v, shared);
  } else {
    keep4<READY>(x, o + l, m - l, v);
  }
}
template <bool READY, int T, int ROWS, class X> D void keep_rows(X* x, i64 o, int m, float sum, Quad* shared) {
  if constexpr (READY && sizeof(X) == 4) {
    if (__all_sync(FULL, sum < HUGE_STATE)) { store_rows<true, T, ROWS>(x, o, shared); return; }
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

struct Sum { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; } };
struct Most { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a > b ? a : b; } };
struct Least { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a < b ? a : b; } };
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
#define TEAM(name, reduce, Join)                                                        \
  template <int T> D i32 name(i32 v) {                                                  \
    WHOLE_WARP(reduce(FULL, v))                                                         \
    for (int h = T / 2; h > 0; h >>= 1) v = Join()(v, __shfl_xor_sync(FULL, v, h, T));   \
    return v;                                                                           \
  }
TEAM(team_max, __reduce_max_sync, Most)
TEAM(team_min, __reduce_min_sync, Least)
TEAM(team_count, __reduce_add_sync, Sum)
#undef TEAM

// ---- over a block of 256 threads: the parts of one piece ----
// Loads of several parts are under way at once: a block that waits for each takes longer than the walk.

// what `join` makes of the first LANES threads' values, halves by halves
template <int LANES, class T, class JOIN> D T fold_lanes(T own, JOIN join) {
  __shared__ T lanes[LANES];
  if (threadIdx.x < LANES) lanes[threadIdx.x] = own;
  for (int h = LANES / 2; h > 0; h >>= 1) {
    __syncthreads();
    if ((int)threadIdx.x < h) lanes[threadIdx.x] = join(lanes[threadIdx.x], lanes[threadIdx.x + h]);
  }
  __syncthreads();
  own = lanes[0];
  __syncthreads();
  return own;
}
D double block_sum(const u32* parts, i64 tiles) {
  double sum = 0.0;
#pragma unroll 16
  for (i64 i = threadIdx.x < 128 ? threadIdx.x : tiles; i < tiles; i += 128) sum += (double)__int_as_float((i32)parts[i]);
  return fold_lanes<128>(sum, Sum());
}
// integers, in any order
template <class JOIN, class T> D T block_join(const u32* parts, i64 count, T own) {
#pragma unroll 16
  for (i64 i = threadIdx.x; i < count; i += 256) own = JOIN()(own, (T)(i32)parts[i]);
  return fold_lanes<256>(own, JOIN());
}
D i32 block_max(const u32* parts, i64 count) { return block_join<Most>(parts, count, -2147483647); }
D i32 block_min(const u32* parts, i64 count) { return block_join<Least>(parts, count, 2147483647); }
D i64 block_count(const u32* parts, i64 count) { return block_join<Sum>(parts, count, 0ll); }

// ---- numbers that one kernel leaves for others ----

template <class T> D u64 slot_of(T x) { u64 slot = 0; memcpy(&slot, &x, sizeof(T)); return slot; }
template <class T> D T held(u64 slot) { T x; memcpy(&x, &slot, sizeof(T)); return x; }

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

// [Note: trits] in reference/fields.py: a tile of m codes (a byte each, in shared memory)
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

// what `join` makes of the values of the threads before, from `start` on; that of all in *all
template <int THREADS, class JOIN> D i64 block_before(i64 value, i64 start, i64* all, JOIN join) {
  __shared__ i64 warps[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int h = 1; h < 32; h *= 2) {
    const i64 below = __shfl_up_sync(FULL, value, h, 32);
    if (lane >= h) value = join(below, value);
  }
  if (lane == 31) warps[warp] = value;
  const i64 own = __shfl_up_sync(FULL, value, 1, 32);
  __syncthreads();
  i64 before = start;
  *all = start;
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) before = join(before, warps[w]);
    *all = join(*all, warps[w]);
  }
  __syncthreads();
  return lane ? join(before, own) : before;
}
// exclusive prefix sum over the threads of a block; the sum of all in *sum
template <int THREADS> D i64 block_scan(i64 value, i64* sum) { return block_before<THREADS>(value, 0, sum, Sum()); }
// Values become what `join` makes of those before, from `start` on; returns that of all. 256 threads.
template <class T, class JOIN> D i64 scan_array(T* values, i64 length, i64 start, JOIN join) {
  for (i64 o = 0; o < length; o += 256 * 8) {
    const i64 i = o + threadIdx.x * 8;
    i64 own, all;
    T held[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      held[k] = i + k < length ? values[i + k] : (T)0;
      own = k ? join(own, (i64)held[k]) : (i64)held[k];
    }
    i64 at = block_before<256>(own, start, &all, join);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (i + k < length) {
        values[i + k] = (T)at;
        at = join(at, (i64)held[k]);
      }
    start = all;
  }
  return start;
}
template <class T> D i64 scan_array(T* counts, i64 length) { return scan_array(counts, length, 0, Sum()); }
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
