// Searches of a piece for the k-th largest key, digit by digit.

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
