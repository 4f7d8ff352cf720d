// [Note: bit streams] in bitstreams.py: Golomb-Rice and Elias delta codes of positions. Where a code
// is written follows from a prefix sum of lengths; for where it is read, see cuda_streams.cuh.

D int rice_parameter(i64 count, i64 n) {
  i64 mean = 9624 * n / (10000 * (count > 1 ? count : 1));
  int b = 0;
  for (; mean > 1; mean >>= 1) ++b;
  return b;
}
D int bits_of_int(i64 value) {
  int bits = 0;
  for (; value > 0; value >>= 1) ++bits;
  return bits;
}
D i64 gap_of(const i64* idx, i64 j) { return idx[j] - (j ? idx[j - 1] : -1); }

// the code of a position that lies v after the one before it
struct golomb_code {
  i64 ones, rest;
  int low;
  __device__ golomb_code(i64 v, int b) : ones((v - 1) >> b), rest((v - 1) & ((1ll << b) - 1)), low(b) {}
  __device__ i64 length() const { return ones + 1 + low; }
  __device__ u32 bit(i64 k) const { return k < ones ? 1u : k == ones ? 0u : (u32)(rest >> (k - ones - 1) & 1); }
};
struct elias_code {
  i64 v;
  int low, m;
  __device__ elias_code(i64 v, int) : v(v), low(bits_of_int(v) - 1), m(bits_of_int(low + 1) - 1) {}
  __device__ i64 length() const { return low + 2 * m + 1; }
  __device__ u32 bit(i64 k) const {
    if (k <= m) return k == m;
    return (u32)((k <= 2 * m ? (i64)(low + 1) >> (k - m - 1) : v >> (k - 2 * m - 1)) & 1);
  }
};
// what stands before the codes, in bytes, and their parameter
D int golomb_head() { return 1; }
D int elias_head() { return 0; }
D int golomb_parameter(i64 count, i64 n) { return rice_parameter(count, n); }
D int elias_parameter(i64 count, i64 n) { return 0; }
// Write the bytes whose first bit is in the code of position j, which begins at `bit`: what follows
// in the last of them belongs to the next positions, so no two threads write one byte.
template <class CODE> D void store_code(const i64* idx, i64 j, i64 count, i64 bit, int parameter, u8* out) {
  const CODE own(gap_of(idx, j), parameter);
  const i64 end = bit + own.length();
  for (i64 byte = (bit + 7) >> 3; 8 * byte < end; ++byte) {
    u32 value = 0;
    int filled = 0;
    for (i64 k = 8 * byte - bit; filled < 8 && k < own.length(); ++k) value |= own.bit(k) << filled++;
    for (i64 next = j + 1; filled < 8 && next < count; ++next) {
      const CODE code(gap_of(idx, next), parameter);
      for (i64 k = 0; filled < 8 && k < code.length(); ++k) value |= code.bit(k) << filled++;
    }
    out[byte] = (u8)value;
  }
}
D i64 take_bits(const u8* data, i64 bit, i64 end, i64 count) {
  if (bit + count > end) return -1;
  i64 value = 0;
  for (i64 i = 0; i < count; ++i) value |= (i64)(data[(bit + i) >> 3] >> ((bit + i) & 7) & 1) << i;
  return value;
}
D i64 run_of_bits(const u8* data, i64 bit, i64 end, int kind) {
  for (i64 count = 0; bit + count < end; ++count)
    if ((data[(bit + count) >> 3] >> ((bit + count) & 7) & 1) != kind) return count;
  return -1;
}
D bool stream_ended(const u8* data, i64 bit, i64 end) {
  return end - bit < 8 && take_bits(data, bit, end, end - bit) == 0;
}
// whether `length` bytes are exactly `count` positions below n, which are left in idx (room for most)
D bool load_golomb(const u8* data, i64 length, i64 count, i64 n, i64* idx) {
  if (length < 1 || data[0] > 40) return false;
  const i64 b = data[0], end = 8 * length;
  i64 bit = 8, before = -1;
  for (i64 j = 0; j < count; ++j) {
    const i64 ones = run_of_bits(data, bit, end, 1);
    if (ones < 0 || ones << b >= n) return false;
    bit += ones + 1;
    const i64 rest = take_bits(data, bit, end, b);
    if (rest < 0) return false;
    bit += b;
    before += (ones << b) + rest + 1;
    if (before >= n) return false;
    idx[j] = before;
  }
  return stream_ended(data, bit, end);
}
D bool load_elias(const u8* data, i64 length, i64 count, i64 n, i64* idx) {
  const i64 end = 8 * length;
  i64 bit = 0, before = -1;
  for (i64 j = 0; j < count; ++j) {
    const i64 m = run_of_bits(data, bit, end, 0);
    if (m < 0 || m > 5) return false;
    bit += m + 1;
    i64 low = take_bits(data, bit, end, m);
    if (low < 0) return false;
    bit += m;
    low += (1ll << m) - 1;
    if (low > 40) return false;
    const i64 rest = take_bits(data, bit, end, low);
    if (rest < 0) return false;
    bit += low;
    before += (1ll << low) + rest;
    if (before >= n) return false;
    idx[j] = before;
  }
  return stream_ended(data, bit, end);
}
