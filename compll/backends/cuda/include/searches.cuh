// Searches of a piece for keys of given ranks, digit by digit, and tables.

D u32 digits(i32 key) { return (u32)key ^ 0x80000000u; }
// the first of `count` ascending values that is not below `wanted`
D int first_from(const u32* values, int count, u32 wanted) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}
// The next digit of a block's keys, in the histogram of the first rank whose upper digits they have. RANKS:
// 0 while no digit is known: there is one histogram, of all keys. Small ones are in shared memory first.
template <int BITS, int SHIFT, int RANKS> D void count_digits(const i32* keys, i64 begin, i64 size, int each, const u32* known, u64* hist) {
  constexpr int ALL = (RANKS ? RANKS : 1) << BITS;
  constexpr bool SHARED = ALL <= BINS;
  __shared__ u32 bins[SHARED ? ALL : 1], wanted[RANKS ? RANKS : 1];
  for (int b = threadIdx.x; SHARED && b < ALL; b += blockDim.x) bins[b] = 0;
  for (int j = threadIdx.x; j < RANKS; j += blockDim.x) wanted[j] = known[j];
  __syncthreads();
  const u32 only = RANKS == 1 ? *known : 0;
  const auto take = [&](i32 key) {
    const u32 y = digits(key), upper = RANKS ? y >> (BITS + SHIFT) % 32 : 0;
    const int slot = RANKS > 1 ? first_from(wanted, RANKS, upper) : 0;
    if (RANKS > 1 ? slot == RANKS || wanted[slot] != upper : upper != only) return;
    const int bin = slot << BITS | (int)(y >> SHIFT & ((1u << BITS) - 1u));
    if (SHARED) atomicAdd(&bins[bin], 1u); else atomicAdd(&hist[bin], (u64)1);
  };
  keys += begin;
  const int own = size - begin < each ? (int)(size - begin) : each, fours = own / 4;
#pragma unroll 4
  for (int i = threadIdx.x; i < fours; i += blockDim.x) {
    const Four<i32> q = ((const Four<i32>*)keys)[i];
    for (int j = 0; j < 4; ++j) take(q.v[j]);
  }
  for (int i = 4 * fours + (int)threadIdx.x; i < own; i += blockDim.x) take(keys[i]);
  __syncthreads();
  for (int b = threadIdx.x; SHARED && b < ALL; b += blockDim.x)
    if (bins[b]) atomicAdd(&hist[b], (u64)bins[b]);
}
// The bin of the rank-th largest key. 256 threads.
// hist is cleared for the next digit; prefix and rank become those within the bin.
template <int BITS> D void pick(u64* hist, u32* prefix, i64* rank) {
  const int bins = 1 << BITS, each = bins / 256, top = bins - 1 - (int)threadIdx.x * each;
  const i64 wanted = *rank;
  const u32 known = *prefix;
  i64 own = 0, all;
  for (int q = 0; q < each; ++q) own += (i64)hist[top - q];
  i64 before = block_scan<256>(own, &all);
  if (before < wanted && wanted <= before + own) {
    int q = 0;
    while (before + (i64)hist[top - q] < wanted) before += (i64)hist[top - q++];
    *prefix = known << BITS | (u32)(top - q);
    *rank = wanted - before;
  }
  __syncthreads();
  for (int q = 0; q < each; ++q) hist[top - q] = 0;
}
// Every rank's bin, smallest keys first. Ranks become those within the bin; bins are cleared.
template <int BITS> D void pick_ranks(u64* hist, const u32* known, u32* next, i64* ranks, int count, bool start, int all) {
  for (int j = threadIdx.x; j < count; j += blockDim.x) {
    const u64* const bins = hist + ((i64)(start ? 0 : first_from(known, count, known[j])) << BITS);
    i64 rank = ranks[j];
    int bin = 0;
    while (bin + 1 < 1 << BITS && rank >= (i64)bins[bin]) rank -= (i64)bins[bin++];
    next[j] = (start ? 0 : known[j] << BITS) | (u32)bin;
    ranks[j] = rank;
  }
  __syncthreads();
  for (int b = threadIdx.x; b < all; b += blockDim.x) hist[b] = 0;
}

// ---- tables: a few float32 numbers of a piece, in scratch memory or in a payload ----

// a table in a payload, at an address that a float can be loaded from if it is READY
template <bool READY> struct Table {
  const u8* at;
  __device__ __forceinline__ float operator[](int i) const { return load_float32<READY>(at + 4 * i); }
};
// value i, clipped to the table's ends
template <class T> D float lookup(T table, int size, i32 i) { return table[i < 0 ? 0 : i < size ? i : size - 1]; }
// number of ascending edges whose key is not larger
template <class T> D i32 bucket(i32 wanted, T edges, int size) {
  int low = 0, high = size;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (op_order_key(edges[middle]) <= wanted) low = middle + 1; else high = middle;
  }
  return low;
}
