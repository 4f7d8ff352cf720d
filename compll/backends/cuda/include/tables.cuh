// Tables: a few float32 numbers of a piece, in scratch memory or (as bytes) in a payload.

D float table_value(const float* table, int i) { return table[i]; }
D float table_value(const u8* table, int i) { return load_float32(table + 4 * i); }
// value i, clipped to the table's ends
template <class T> D float lookup(const T* table, int size, i32 i) {
  return table_value(table, i < 0 ? 0 : i < size ? i : size - 1);
}
// number of ascending edges whose key is not larger
template <class T> D i32 bucket(i32 wanted, const T* edges, int size) {
  int low = 0, high = size;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (op_order_key(table_value(edges, middle)) <= wanted) low = middle + 1; else high = middle;
  }
  return low;
}

// ---- several ranks at once: a histogram for the digits of every rank ----

// the first of `count` ascending values that is not below `wanted`
D int first_from(const u32* values, int count, u32 wanted) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}
// The next digit of a block's keys, in the histogram of the first rank that has their upper digits.
// COUNT: ranks; 0: there is one histogram, of all. Small ones are in shared memory first.
template <int BITS, int SHIFT, int COUNT, int MOST> D void count_ranked(const i32* keys, i64 begin, i64 size, int each, const u32* known, u64* ranked) {
  constexpr int ALL = (COUNT ? COUNT : 1) << BITS;
  constexpr bool SHARED = ALL <= MOST;
  __shared__ u32 counts[SHARED ? ALL : 1];
  __shared__ u32 wanted[COUNT ? COUNT : 1];
  if (SHARED) for (int b = threadIdx.x; b < ALL; b += blockDim.x) counts[b] = 0;
  for (int j = threadIdx.x; j < COUNT; j += blockDim.x) wanted[j] = known[j];
  __syncthreads();
  const i64 end = size - begin < each ? size : begin + each;
  for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const u32 y = digits(keys[i]), prefix = COUNT ? y >> (BITS + SHIFT) % 32 : 0;
    const int slot = COUNT ? first_from(wanted, COUNT, prefix) : 0;
    if (COUNT && (slot == COUNT || wanted[slot] != prefix)) continue;
    const int place = slot << BITS | (int)(y >> SHIFT & ((1u << BITS) - 1u));
    if (SHARED) atomicAdd(&counts[place], 1u); else atomicAdd(&ranked[place], (u64)1);
  }
  __syncthreads();
  if (SHARED)
    for (int b = threadIdx.x; b < ALL; b += blockDim.x)
      if (counts[b]) atomicAdd(&ranked[b], (u64)counts[b]);
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

