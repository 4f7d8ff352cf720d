// Codes of positions: gaps (LEB128), and Golomb-Rice codes ([Note: bit streams] in
// routines/streams.py). A prefix sum of lengths gives the place to write a code; streams.cuh finds the place
// to read one.

D i64 gap_of(const i32* idx, i64 j) { return (i64)idx[j] - (j ? idx[j - 1] : -1); }

// The code of a position that lies v after the one before it, of `count` of n. head: bytes that stand
// before the codes, which begin() stores.
struct gaps_code {
  static constexpr int head = 0;
  i64 v;
  __device__ gaps_code(i64 v, i64, i64) : v(v - 1) {}
  static __device__ void begin(u8*, i64, i64) {}
  __device__ i64 length() const { i64 bits = 8; for (i64 w = v; w >= 128; w >>= 7) bits += 8; return bits; }
  __device__ u32 bit(i64 k) const {
    return k % 8 == 7 ? k + 1 < length() : (u32)(v >> (k / 8 * 7 + k % 8) & 1);
  }
};
struct golomb_code {
  static constexpr int head = 1;
  i64 ones, rest;
  int low;
  __device__ golomb_code(i64 v, i64 count, i64 n) : low((int)rice_parameter(count, n)) {
    ones = (v - 1) >> low;
    rest = (v - 1) & ((1ll << low) - 1);
  }
  static __device__ void begin(u8* out, i64 count, i64 n) { *out = (u8)rice_parameter(count, n); }
  __device__ i64 length() const { return ones + 1 + low; }
  __device__ u32 bit(i64 k) const { return k < ones ? 1u : k == ones ? 0u : (u32)(rest >> (k - ones - 1) & 1); }
};
// the bits of a block's codes before that of position j, and of all of them; 256 threads
template <class CODE> D i64 bits_before(const i32* idx, i64 j, i64 count, i64 n, i64* all) {
  return block_scan<256>(j < count ? CODE(gap_of(idx, j), count, n).length() : 0, all);
}
// Write the bytes whose first bit is in the code of position j, which begins at `bit`. The last byte
// includes bits of the next positions, so no two threads write the same byte.
template <class CODE> D void store_code(const i32* idx, i64 j, i64 count, i64 n, i64 bit, u8* out) {
  if (j >= count) return;
  const CODE own(gap_of(idx, j), count, n);
  out += CODE::head;
  const i64 end = bit + own.length();
  for (i64 byte = (bit + 7) >> 3; 8 * byte < end; ++byte) {
    u32 value = 0;
    int filled = 0;
    for (i64 k = 8 * byte - bit; filled < 8 && k < own.length(); ++k) value |= own.bit(k) << filled++;
    for (i64 next = j + 1; filled < 8 && next < count; ++next) {
      const CODE code(gap_of(idx, next), count, n);
      for (i64 k = 0; filled < 8 && k < code.length(); ++k) value |= code.bit(k) << filled++;
    }
    out[byte] = (u8)value;
  }
}
// true if only zeros of the last byte follow
D bool stream_ended(const u8* data, i64 bit, i64 end) {
  return bit == end || (end - bit < 8 && data[bit >> 3] >> (bit & 7) == 0);
}

// ---- runs of trits ----

// Runs of the byte of ones, shortened: [Note: runs] in routines/streams.py. The code of a byte depends on the start
// of its run, which is known from the last other byte before it.
// Blocks have 256 threads, a thread eight bytes.

// the largest value of the threads before; at least `least`; the largest of all in *top
D i64 block_max_before(i64 value, i64 least, i64* top) { return block_before<256>(value, least, top, Most()); }
// values become the largest of those before them, -1 for the first
D void max_before_array(i64* values, i64 length) { scan_array(values, length, -1, Most()); }
// the last of a thread's bytes from `i` on that is not of ones, else -1
D i64 last_break(const u8* trits, i64 length, i64 i) {
  i64 last = -1;
  for (int k = 0; k < 8; ++k, ++i)
    if (i < length && trits[i] != ONES) last = i;
  return last;
}
// Bytes that a thread's bytes from `i` on become, where `last` is the last break before them; stored
// where `out` is not null. A run of ones gives a byte at every fourteenth and at its end.
D int shorten(const u8* trits, i64 length, i64 i, i64 last, u8* out) {
  int made = 0;
  for (int k = 0; k < 8 && i < length; ++k, ++i) {
    u32 byte = trits[i];
    if (byte != ONES) {
      last = i;
    } else {
      const u32 place = (u32)((i - last - 1) % LONGEST_RUN);
      if (place + 1 < LONGEST_RUN && i + 1 < length && trits[i + 1] == ONES) continue;
      byte = place ? FIRST_RUN - 1 + place : ONES;
    }
    if (out) out[made] = (u8)byte;
    ++made;
  }
  return made;
}
// The same of a block, whose last break before it is known: bytes of all its threads, stored from `out`
// on where that is not null.
D void shortened(const u8* trits, i64 length, i64 i, i64 least, u8* out, i64* all) {
  i64 top;
  const i64 last = block_max_before(last_break(trits, length, i), least, &top);
  const i64 to = block_scan<256>(shorten(trits, length, i, last, (u8*)0), all);
  if (out) shorten(trits, length, i, last, out + to);
}
// number of bytes of trits that a thread's bytes from `i` on stand for
D int lengthened(const u8* data, i64 length, i64 i) {
  int total = 0;
  for (int k = 0; k < 8; ++k, ++i)
    if (i < length) total += data[i] < FIRST_RUN ? 1 : data[i] - (FIRST_RUN - 2);
  return total;
}
D void lengthen(const u8* data, i64 length, i64 i, u8* trits) {
  for (int k = 0; k < 8 && i < length; ++k, ++i) {
    if (data[i] < FIRST_RUN) { *trits++ = data[i]; continue; }
    for (int j = data[i] - (FIRST_RUN - 2); j > 0; --j) *trits++ = ONES;
  }
}
