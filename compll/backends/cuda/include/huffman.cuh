// Huffman codes: [Note: huffman] in routines/huffman.py. A thread of a block of 256 has a number of the head; in
// other blocks a thread has a tile.
constexpr int COPIES = 8;

// Add the counts of a block's numbers, those from `begin` to `end`, to `counts`. Lanes count in COPIES
// tables, since they have to wait for others that count the same number.
D void count_numbers(const u8* numbers, i64 begin, i64 end, u64* counts) {
  __shared__ u32 own[NUMBERS * COPIES];
  for (int k = threadIdx.x; k < NUMBERS * COPIES; k += blockDim.x) own[k] = 0;
  __syncthreads();
  for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x)
    atomicAdd(&own[numbers[i] * COPIES + threadIdx.x % COPIES], 1u);
  __syncthreads();
  for (int k = threadIdx.x; k < NUMBERS; k += blockDim.x) {
    u32 all = 0;
    for (int c = 0; c < COPIES; ++c) all += own[k * COPIES + c];
    if (all) atomicAdd(&counts[k], (u64)all);
  }
}
// The depth of a thread's weight in the tree, -1 if it is 0; the largest in *most. The lightest leaf is
// the deepest.
D int depth_of(u64 weight, int* most) {
  __shared__ u64 keys[NUMBERS];
  __shared__ i64 tree[2 * NUMBERS];
  __shared__ i32 parents[2 * NUMBERS];
  i64 leaves;
  block_scan<NUMBERS>(weight > 0, &leaves);
  const u64 key = (weight ? weight : 1ull << 54) << 8 | threadIdx.x;
  keys[threadIdx.x] = key;
  __syncthreads();
  int rank = 0;
  for (int k = 0; k < NUMBERS; ++k) rank += keys[k] < key;
  tree[rank] = (i64)weight;
  __syncthreads();
  if (threadIdx.x == 0) join(tree, parents, leaves);
  __syncthreads();
  *most = (int)tree[0];
  const int depth = weight ? (int)tree[rank] : -1;
  __syncthreads();
  return depth;
}
// The first window of the code of a thread's number, by its length; in *filled the windows of all codes,
// too many if one is too long.
D int first_window(int length, int* filled) {
  __shared__ int lengths[NUMBERS];
  lengths[threadIdx.x] = length;
  __syncthreads();
  int first = 0, all = 0;
  for (int k = 0; k < NUMBERS; ++k) {
    const int other = lengths[k];
    const int windows = other < 0 ? 0 : other > LONGEST ? 2 << LONGEST : 1 << (LONGEST - other);
    if (other < length || (other == length && k < (int)threadIdx.x)) first += windows;
    all += windows;
  }
  __syncthreads();
  *filled = all;
  return first;
}
// Store the lengths of codes for these counts, and the codes, with their lengths from bit 16 on. Clears the
// counts.
D void make_codes(u64* counts, int bits, u8* out, u32* codes) {
  const int number = threadIdx.x, numbers = 1 << bits;
  const u64 count = counts[number];
  u64 weight = count;
  int most, filled, length = depth_of(weight, &most);
  while (most > LONGEST) {
    weight = (weight + 1) >> 1;
    length = depth_of(weight, &most);
  }
  i64 longer;
  block_scan<NUMBERS>((i64)count * (length - bits), &longer);
  if (longer > 0) length = number < numbers ? bits : -1;
  const int first = first_window(length, &filled), next = __shfl_xor_sync(FULL, length, 1, 32);
  codes[number] = length < 0 ? 0 : (u32)first >> (LONGEST - length) | (u32)length << 16;
  if (number % 2 == 0 && number < numbers) out[number / 2] = (u8)(length + 1 | next + 1 << 4);
  counts[number] = 0;
}
// The number and, from bit 8 on, the length of every window's code; false if codes do not fill all windows.
D bool fill_table(const u8* head, int bits, u32* table) {
  const int number = threadIdx.x;
  const int length = number < 1 << bits ? (head[number / 2] >> 4 * (number % 2) & 15) - 1 : -1;
  int filled;
  const int first = first_window(length, &filled);
  if (filled != 1 << LONGEST) return false;
  for (int k = 0; length >= 0 && k < 1 << (LONGEST - length); ++k) table[first + k] = (u32)(number | length << 8);
  return true;
}

// bytes of the stream of m numbers
D i64 stream_bytes(const u8* numbers, i64 m, const u32* codes) {
  u32 bits = 0;
  for (int i = 0; i < m; ++i) bits += codes[numbers[i]] >> 16;
  return (bits + 7) / 8;
}
D void store_stream(const u8* numbers, i64 m, const u32* codes, u8* out) {
  u32 word = 0;
  int fill = 0;
  for (int i = 0; i < m; ++i) {
    const u32 code = codes[numbers[i]];
    word = word << (code >> 16) | (code & 0xFFFFu);
    fill += (int)(code >> 16);
    while (fill >= 8) *out++ = (u8)(word >> (fill -= 8));
  }
  if (fill) *out = (u8)(word << (8 - fill));
}
// m numbers of a stream; false if it does not end with the last one's code
D bool load_stream(const u8* data, int size, i64 m, const u32* table, u8* numbers) {
  u32 word = 0, four = 0;
  int fill = 0, at = 0;
  for (int i = 0; i < m; ++i) {
    for (; fill < LONGEST; fill += 8, ++at) word = word << 8 | (at < size ? data[at] : 0u);
    const u32 entry = table[word >> (fill - LONGEST) & ((1u << LONGEST) - 1)];
    fill -= (int)(entry >> 8);
    four |= (entry & 255u) << 8 * (i % 4);
    if (i % 4 == 3) { store_as<u32>(numbers + i - 3, four); four = 0; }
  }
  for (i64 i = m & -4; i < m; ++i) numbers[i] = (u8)(four >> 8 * (i % 4));
  const int left = 8 * (size - at) + fill;
  return left >= 0 && left < 8 && !(word & ((1u << fill) - 1));
}
