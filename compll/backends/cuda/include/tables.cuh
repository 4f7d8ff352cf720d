// Tables: a few float32 numbers of a piece, in scratch memory or (as bytes) in a payload.

D float table_value(const float* table, int i) { return table[i]; }
D float table_value(const u8* table, int i) { return load_float32(table + 4 * i); }
// value i, clipped to the table's ends
template <class T> D float lookup(const T* table, int size, i32 i) {
  return table_value(table, i < 0 ? 0 : i < size ? i : size - 1);
}
// how many of the ascending edges are not above x
template <class T> D i32 bucket(float x, const T* edges, int size) {
  const i32 wanted = key(x);
  int low = 0, high = size;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (key(table_value(edges, middle)) <= wanted) low = middle + 1; else high = middle;
  }
  return low;
}

// ---- several ranks at once: radix selection with a histogram for every prefix still wanted ----

// the first of `count` ascending values that is not below `wanted`
D int first_from(const u32* values, int count, u32 wanted) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}
// where an element is counted: the histogram of the first equal prefix, or -1
D int slot_of(const u32* known, int count, u32 prefix) {
  const int slot = first_from(known, count, prefix);
  return slot < count && known[slot] == prefix ? slot : -1;
}
// One round: every rank's bin, smallest keys first. Ranks become those within the bin.
template <int BITS> D void pick_ranks(const u64* hist, const u32* known, u32* next, i64* ranks, int count, bool start) {
  for (int j = threadIdx.x; j < count; j += blockDim.x) {
    const u64* const bins = hist + ((i64)(start ? 0 : first_from(known, count, known[j])) << BITS);
    i64 rank = ranks[j];
    int bin = 0;
    while (bin + 1 < 1 << BITS && rank >= (i64)bins[bin]) rank -= (i64)bins[bin++];
    next[j] = (start ? 0 : known[j] << BITS) | (u32)bin;
    ranks[j] = rank;
  }
}

// ---- means by index: [Note: order of sums] in numbers.py ----

// a warp's 32 elements in order, each added by the thread that its bin belongs to
D void add_in_order(double* sums, u32* counts, int size, i32 index, float x, int count) {
  const int bin = index < 0 ? 0 : index < size ? index : size - 1, u = threadIdx.x % 32;
  for (int e = 0; e < 32; ++e) {
    const int b = __shfl_sync(FULL, bin, e, 32);
    const float y = __shfl_sync(FULL, x, e, 32);
    if (b % 32 != u || e >= count) continue;
    sums[b] += (double)y;
    ++counts[b];
  }
}
// the mean of a bin from its lanes' sums, `stride` numbers apart; `lanes` is at most 1024
D float mean_of(const double* sums, int lanes, int stride, u64 count) {
  __shared__ double held[1024];
  int half = 1;
  while (half < lanes) half *= 2;
  for (int l = threadIdx.x; l < half; l += blockDim.x) held[l] = l < lanes ? sums[(i64)l * stride] : 0.0;
  for (half /= 2; half > 0; half /= 2) {
    __syncthreads();
    for (int l = threadIdx.x; l < half; l += blockDim.x) held[l] += held[l + half];
  }
  __syncthreads();
  const double mean = held[0] / (double)(count > 1 ? count : 1);
  return isnan(mean) ? NAN_F : (float)mean;
}
