// Streams of codes read in parallel. A stream is units of at most 64 bits: an Elias code, a one of
// Golomb's ones, or its zero with the low bits. A chunk of the stream is read from each of 64 places
// where its first unit might begin; what that gives (where the next chunk's first unit begins, how
// many codes end, what they add) is combined along the stream, and the chunks are read again from the
// places where they really begin.

#define CHUNK 2048   // bits
#define PLACES 64
#define STOPPED 255  // instead of a place: nothing further can be read
#define FAR (1ll << 60)

struct Unit {
  int length;  // bits; 0 where there is no unit
  i64 add;     // to the position
  bool ends;   // whether a code ends
};
struct golomb_units {
  static __device__ Unit at(u64 w, i64 left, int b) {
    if (left < 1) return {0, 0, false};
    if (w & 1) return {1, 1ll << b, false};
    if (left < 1 + b) return {0, 0, false};
    return {1 + b, (i64)(w >> 1 & ((1ull << b) - 1)) + 1, true};
  }
};
struct elias_units {
  static __device__ Unit at(u64 w, i64 left, int) {
    int m = 0;
    while (m < 6 && !(w >> m & 1)) ++m;
    if (m > 5) return {0, 0, false};
    const int low = (int)(w >> (m + 1) & ((1u << m) - 1)) + (1 << m) - 1, length = 2 * m + 1 + low;
    if (low > 40 || length > left) return {0, 0, false};
    return {length, (i64)((w >> (2 * m + 1) & ((1ull << low) - 1)) | 1ull << low), true};
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
// what has been read: codes, their sum, and the place in the chunk that follows
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
