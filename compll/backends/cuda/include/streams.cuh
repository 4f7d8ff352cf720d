// Streams of codes read in parallel. A stream is units of at most 64 bits: a gap, a one of
// Golomb's ones, or its zero with the low bits. A chunk of the stream is read from each of 64 possible
// starts of its first unit. The results (the start of the next chunk's first unit, the number of codes
// that end, their sum) are combined along the stream, and the chunks are read again from their
// true starts.

#define STOPPED 255  // instead of a place: nothing further can be read
#define FAR (1ll << 60)

struct Unit {
  int length;  // bits; 0 where there is no unit
  i64 add;     // to the position
  bool ends;   // whether a code ends
};
struct gaps_units {
  static constexpr int head = 0;
  static __device__ int parameter(i64, i64) { return 0; }
  static __device__ Unit at(u64 w, i64 left, int) {
    i64 value = 0;
    for (int k = 0; k < 6 && 8 * k < left; ++k) {
      const u32 byte = (u32)(w >> 8 * k) & 255u;
      value |= (i64)(byte & 127u) << 7 * k;
      if (byte < 128) return {k && !byte ? 0 : 8 * (k + 1), value + 1, true};
    }
    return {0, 0, false};
  }
};
struct golomb_units {
  static constexpr int head = 1;
  static __device__ int parameter(i64 count, i64 n) { return (int)rice_parameter(count, n); }
  static __device__ Unit at(u64 w, i64 left, int b) {
    if (left < 1) return {0, 0, false};
    if (w & 1) return {1, 1ll << b, false};
    if (left < 1 + b) return {0, 0, false};
    return {1 + b, (i64)(w >> 1 & ((1ull << b) - 1)) + 1, true};
  }
};
// bytes of a stream in shared memory, zeros beyond its end
D void stage(u32* words, int bytes, const u8* codes, i64 from, i64 length) {
  for (int k = threadIdx.x; k < bytes; k += blockDim.x)
    ((u8*)words)[k] = from + k < length ? codes[from + k] : (u8)0;
  __syncthreads();
}
D u64 window(const u32* words, int bit) {
  const u32* const w = words + bit / 32;
  const int shift = bit % 32;
  const u64 low = (u64)w[0] | (u64)w[1] << 32;
  return shift ? low >> shift | (u64)w[2] << (64 - shift) : low;
}
// the results of a read: codes, their sum, and the place in the next chunk
struct Read {
  i64 codes, sum;
  int place;
};
D i64 added(i64 sum, i64 more) { return sum + more < FAR ? sum + more : FAR; }
D void then(Read& read, u64 sum, i64 codes, int place) {
  read.sum = added(read.sum, (i64)sum);
  read.codes += codes;
  read.place = place;
}
// the units of a chunk that begins at bit `begin` of `words` and has `left` bits of stream from there
// on, from read.place on; `take(unit, bit)` is called for each, and ends the walk by `false`
template <class UNITS, class TAKE> D void read_chunk(const u32* words, int begin, i64 left, int b, Read& read, TAKE take) {
  int bit = read.place;
  while (bit < CHUNK) {
    const Unit unit = UNITS::at(window(words, begin + bit), left - bit, b);
    if (unit.length == 0) { read.place = STOPPED; return; }
    bit += unit.length;
    read.sum += unit.add;
    read.codes += unit.ends;
    if (!take(unit, bit)) return;
  }
  read.place = bit - CHUNK;
}
// 44 bits of the sum (a larger one is beyond every tensor), 12 of the codes, 8 of the place
D u64 packed_read(const Read& read) {
  const u64 most = (1ull << 44) - 1, sum = (u64)read.sum < most ? (u64)read.sum : most;
  return sum | (u64)read.codes << 44 | (u64)read.place << 56;
}
D void then_chunk(Read& read, const u64* table) {
  const u64 w = table[read.place];
  then(read, w & ((1ull << 44) - 1), (i64)(w >> 44 & 4095), (int)(w >> 56));
}

// A stream's codes after its head: bits (0 where they are not read here), chunks of them, and room for
// what is read of each chunk from each place. b: the parameter, which the head tells. good: false for
// streams that are shorter than their head or longer than encode makes, or whose parameter no shift
// takes; join_groups compares it.
struct Stream {
  const u8* codes;
  i64 bits, chunks, count;
  int b;
  bool good;
  u64* reads;
};
template <class UNITS> D Stream opened(const u8* data, i64 length, i64 count, u64* reads, i64 room) {
  Stream s = {data + UNITS::head, 0, 0, count, 0, false, reads};
  const i64 bytes = length - UNITS::head;
  s.b = UNITS::head && length > 0 ? data[0] : 0;
  s.good = bytes >= 0 && bytes <= CHUNK / 8 * room && s.b <= 40;
  s.bits = s.good ? 8 * bytes : 0;
  s.chunks = (s.bits + CHUNK - 1) / CHUNK;
  return s;
}
// A block's CHUNKS chunks from every place, a thread each.
template <class UNITS, int CHUNKS> D void read_chunks(const Stream& s, i64 own) {
  __shared__ u32 words[(CHUNKS * CHUNK / 8 + 16) / 4];
  if (own * CHUNKS >= s.chunks) return;
  stage(words, CHUNKS * CHUNK / 8 + 16, s.codes, own * (CHUNKS * CHUNK / 8), s.bits / 8);
  const int q = threadIdx.x / PLACES, start = threadIdx.x % PLACES;
  const i64 chunk = own * CHUNKS + q;
  if (chunk >= s.chunks) return;
  Read read = {0, 0, start};
  read_chunk<UNITS>(words, q * CHUNK, s.bits - chunk * CHUNK, s.b, read, [](Unit, int) { return true; });
  s.reads[chunk * PLACES + start] = packed_read(read);
}
// A group of GROUP chunks from every place, a thread each.
D void join_chunks(const Stream& s, i64 own, i64* to) {
  Read read = {0, 0, (int)threadIdx.x};
  for (i64 c = own * GROUP; c < s.chunks && c < own * GROUP + GROUP && read.place != STOPPED; ++c)
    then_chunk(read, s.reads + c * PLACES);
  to += threadIdx.x * 3;
  to[0] = read.codes, to[1] = read.sum, to[2] = read.place;
}
// One thread finds the true start of every group, and checks the parameter and the number of codes.
template <class UNITS> D void join_groups(const Stream& s, const i64* group_reads, i64* entries, i64 first, i64 last, i64 n, u32* wrong, u32* errors) {
  Read read = {0, 0, 0};
  for (i64 g = first; g < last; ++g) {
    entries[3 * g] = read.codes, entries[3 * g + 1] = read.sum, entries[3 * g + 2] = read.place;
    if (read.place == STOPPED) continue;
    const i64* const group = group_reads + (g * PLACES + read.place) * 3;
    then(read, (u64)group[1], group[0], (int)group[2]);
  }
  const bool ended = s.count > 0 || stream_ended(s.codes, 0, s.bits);
  const bool good = s.good && s.b == UNITS::parameter(s.count, n);
  if (!good || read.codes < s.count || !ended) refuse(wrong, errors, 1);
}
// A thread per chunk, from its true start; the last code must end the stream.
template <class UNITS> D void write_positions(const Stream& s, i64 own, const i64* entry, i64 n, i32* idx, u32* wrong, u32* errors) {
  __shared__ u32 words[(GROUP * CHUNK / 8 + 16) / 4];
  __shared__ Read begins[GROUP];
  if (own * GROUP >= s.chunks) return;
  stage(words, GROUP * CHUNK / 8 + 16, s.codes, own * (GROUP * CHUNK / 8), s.bits / 8);
  if (threadIdx.x == 0) {
    Read read = {entry[0], entry[1], (int)entry[2]};
    for (int c = 0; c < GROUP; ++c) begins[c].place = STOPPED;
    for (i64 c = own * GROUP; c < s.chunks && c < own * GROUP + GROUP && read.place != STOPPED; ++c) {
      begins[c - own * GROUP] = read;
      then_chunk(read, s.reads + c * PLACES);
    }
  }
  __syncthreads();
  Read read = begins[threadIdx.x];
  if (read.place == STOPPED || read.codes >= s.count) return;
  const i64 from = (own * GROUP + threadIdx.x) * CHUNK;
  read_chunk<UNITS>(words, threadIdx.x * CHUNK, s.bits - from, s.b, read, [&](Unit unit, int bit) {
    if (!unit.ends) return true;
    idx[read.codes - 1] = (i32)(read.sum - 1);
    if (read.codes < s.count) return true;
    const bool inside = read.sum <= n;
    if (inside && stream_ended(s.codes, from + bit, s.bits)) return false;
    refuse(wrong, errors, inside ? 1 : 2);
    return false;
  });
}
