// Searches of a piece: the k-th largest key digit by digit, and thresholds by counts.

D u32 digits(i32 key) { return (u32)key ^ 0x80000000u; }
// The next digit of a block's keys, of those whose upper digits are `prefix`.
template <int BITS, int SHIFT> D void histogram(const i32* keys, i64 begin, i64 size, int count, u32 prefix, u64* hist) {
  __shared__ u32 bins[1 << BITS];
  for (int b = threadIdx.x; b < 1 << BITS; b += blockDim.x) bins[b] = 0;
  __syncthreads();
  const auto take = [&](i32 key) {
    const u32 y = digits(key);
    if (BITS + SHIFT == 32 || y >> (BITS + SHIFT) % 32 == prefix) atomicAdd(&bins[y >> SHIFT & ((1u << BITS) - 1u)], 1u);
  };
  keys += begin;
  const int own = size - begin < count ? (int)(size - begin) : count, quads = own / 4;
#pragma unroll 4
  for (int i = threadIdx.x; i < quads; i += blockDim.x) {
    const Quad q = ((const Quad*)keys)[i];
    for (int j = 0; j < 4; ++j) take((i32)q.v[j]);
  }
  for (int i = 4 * quads + (int)threadIdx.x; i < own; i += blockDim.x) take(keys[i]);
  __syncthreads();
  for (int b = threadIdx.x; b < 1 << BITS; b += blockDim.x)
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

// ---- adjust and bisect: [Note: tries] in cpu/threshold_search.py ----

// The memory of a search: the interval that `bisect` halves, or the next threshold of `adjust`; a
// tree of seven thresholds; how many have been tried; the number of the last one, -1 after it.
struct Search {
  double ends[2], tries[7], turn, last;
};
D double middle(double low, double high) { return low + (high - low) / 2.0; }
template <bool HALVES> D double first_try(const double* given) {
  return HALVES ? middle(given[0], given[1]) : given[0];
}
// after number q comes 2 q + 1 if too few elements reach it, else 2 q + 2
template <bool HALVES> D void grow(Search* s, const double* given) {
  double low[7], high[7];
  low[0] = s->ends[0], high[0] = s->ends[1];
  if (!HALVES) s->tries[0] = s->ends[0];
  for (int q = 0; q < 7; ++q) {
    if (HALVES) s->tries[q] = middle(low[q], high[q]);
    if (q > 2) continue;
    if (HALVES) {
      low[2 * q + 1] = low[q], high[2 * q + 1] = s->tries[q];
      low[2 * q + 2] = s->tries[q], high[2 * q + 2] = high[q];
    } else {
      s->tries[2 * q + 1] = s->tries[q] * given[3];
      s->tries[2 * q + 2] = s->tries[q] * given[4];
    }
  }
}
template <bool HALVES> D void begin_search(double* memory, const double* given, int count) {
  Search* const s = (Search*)memory;
  s->ends[0] = given[0], s->ends[1] = given[1];
  s->turn = 0.0;
  s->last = (double)op_as_count(given[count - 1], 100ll) - HALVES;
  grow<HALVES>(s, given);
}
// Follow one path through the tree, and return its end.
template <bool HALVES> D void decide(double* memory, const double* given, const double* counts, double* found, double* count) {
  Search* const s = (Search*)memory;
  const double fewest = given[HALVES ? 2 : 1], most = given[HALVES ? 3 : 2];
  for (int q = 0; q < 7;) {
    *found = s->tries[q], *count = counts[q];
    const bool few = *count < fewest;
    if ((fewest <= *count && *count <= most) || s->turn >= s->last) { s->last = -1.0; return; }
    s->turn += 1.0;
    if (HALVES) s->ends[few ? 1 : 0] = *found; else s->ends[0] = *found * (few ? given[3] : given[4]);
    q = 2 * q + (few ? 1 : 2);
  }
  grow<HALVES>(s, given);
}
