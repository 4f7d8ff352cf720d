// [Note: bit streams] in bitstreams.py: Golomb-Rice and Elias delta codes of positions. A stream is
// read and written by one thread, since where a code begins depends on all codes before it.

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
D i64 put_bits(u8* out, i64 bit, i64 value, i64 count) {
  for (i64 i = 0; i < count; ++i, ++bit) {
    if ((bit & 7) == 0) out[bit >> 3] = 0;
    out[bit >> 3] |= (u8)((value >> i & 1) << (bit & 7));
  }
  return bit;
}
D i64 golomb_size(const i64* idx, i64 count, i64 n) {
  const int b = rice_parameter(count, n);
  i64 bits = 8, before = -1;
  for (i64 j = 0; j < count; ++j) {
    bits += ((idx[j] - before - 1) >> b) + 1 + b;
    before = idx[j];
  }
  return (bits + 7) >> 3;
}
D void store_golomb(const i64* idx, i64 count, u8* out, i64 n) {
  const int b = rice_parameter(count, n);
  out[0] = (u8)b;
  i64 bit = 8, before = -1;
  for (i64 j = 0; j < count; ++j) {
    const i64 d = idx[j] - before - 1;
    before = idx[j];
    for (i64 i = 0; i < d >> b; ++i) bit = put_bits(out, bit, 1, 1);
    bit = put_bits(out, bit, 0, 1);
    bit = put_bits(out, bit, d & ((1ll << b) - 1), b);
  }
}
D i64 elias_size(const i64* idx, i64 count, i64 n) {
  i64 bits = 0, before = -1;
  for (i64 j = 0; j < count; ++j) {
    const int low = bits_of_int(idx[j] - before) - 1;
    bits += low + 2 * (bits_of_int(low + 1) - 1) + 1;
    before = idx[j];
  }
  return (bits + 7) >> 3;
}
D void store_elias(const i64* idx, i64 count, u8* out, i64 n) {
  i64 bit = 0, before = -1;
  for (i64 j = 0; j < count; ++j) {
    const i64 v = idx[j] - before;
    before = idx[j];
    const int low = bits_of_int(v) - 1, m = bits_of_int(low + 1) - 1;
    bit = put_bits(out, bit, 1ll << m, m + 1);
    bit = put_bits(out, bit, low + 1 - (1 << m), m);
    bit = put_bits(out, bit, v - (1ll << low), low);
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
