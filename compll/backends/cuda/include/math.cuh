// exp, log, log2 and powers: [Note: elementary functions] in elementary.py, operation by operation.
// Nothing here may be contracted to fused multiply-add.

D i64 bits_of(double x) { return __double_as_longlong(x); }
D double d_power_of_two(double k) { return __longlong_as_double(((i64)k + 1023) << 52); }
D void d_split(double x, double* m, double* e) {
  const bool tiny = fabs(x) < 2.2250738585072014e-308;
  const i64 y = bits_of(tiny ? x * 18014398509481984.0 : x);
  *m = __longlong_as_double((y & ((1ll << 52) - 1)) | (1022ll << 52));
  *e = (double)((y >> 52 & 2047) - 1022) - (tiny ? 54.0 : 0.0);
}
D double exp_small(double r) {
  double p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  return p * r + 1.0;
}
D double d_scaled(double value, double k) {
  const double half = floor(k * 0.5);
  return value * d_power_of_two(half) * d_power_of_two(k - half);
}
D double log_parts(double x, double* e) {
  double m;
  d_split(x, &m, e);
  if (m < 0.7071067811865476) { m = m + m; *e = *e - 1.0; }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = z * (1.0 / 21.0) + 1.0 / 19.0;
  p = p * z + 1.0 / 17.0;
  p = p * z + 1.0 / 15.0;
  p = p * z + 1.0 / 13.0;
  p = p * z + 1.0 / 11.0;
  p = p * z + 1.0 / 9.0;
  p = p * z + 1.0 / 7.0;
  p = p * z + 1.0 / 5.0;
  p = p * z + 1.0 / 3.0;
  return (s + s) + (s + s) * z * p;
}
#define D_INF __longlong_as_double(0x7ff0000000000000ll)
#define D_NAN __longlong_as_double(0x7ff8000000000000ll)
D double at_the_ends(double x, double value) {
  value = x == D_INF ? D_INF : value;
  return x > 0.0 ? value : x == 0.0 ? -D_INF : D_NAN;
}
D double d_exp(double x) {
  double y = x > -760.0 ? x : -760.0;
  y = y < 720.0 ? y : 720.0;
  const double k = rint(y * 1.4426950408889634);
  const double r = (y - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
  return x == x ? d_scaled(exp_small(r), k) : x;
}
D double d_log(double x) {
  double e;
  const double m = log_parts(x, &e);
  return at_the_ends(x, e * 6.93147180369123816490e-01 + (m + e * 1.90821492927058770002e-10));
}
D double d_log2(double x) {
  double e;
  const double m = log_parts(x, &e);
  return at_the_ends(x, e + m * 1.4426950408889634);
}
D double d_power(double a, double b) {
  const double size = fabs(a), t = b * d_log2(size);
  double y = t > -1100.0 ? t : -1100.0;
  y = y < 1100.0 ? y : 1100.0;
  const double k = rint(y);
  double v = t == t ? d_scaled(exp_small((y - k) * 0.6931471805599453), k) : t;
  v = size == 1.0 && fabs(b) == D_INF ? 1.0 : v;
  const double half = b * 0.5;
  const bool whole = floor(b) == b, odd = whole && floor(half) != half;
  v = a < 0.0 ? (odd ? -v : whole || size == D_INF ? v : D_NAN) : v;
  return b == 0.0 || a == 1.0 ? 1.0 : v;
}

// ---- exponents and trits ----

D i32 exponent(float x) { return 128 - (i32)(((u32)~__float_as_int(x) & 0x7f800000u) >> 23); }
D float power_of_two(i32 i) {
  i = i > -127 ? i : -127;
  return __int_as_float(((i < 128 ? i : 128) + 127) << 23);
}
D i32 trit(i32 x) { return x > 0 ? (x < 2 ? x : 2) : 0; }
D i32 trit(float x) { return (i32)(x > 0.0f ? (x < 2.0f ? x : 2.0f) : 0.0f); }
D i32 trit(bool x) { return x; }
// [Note: trits] in trits.py: a tile of m codes (a byte each, in shared memory)
D void pack_trits(const u8* codes, u8* out, int m, int u, int team) {
  const int width = (m + 4) / 5;
  for (int b = u; b < width; b += team) {
    u32 byte = 0;
    for (int p = 0; p < 5; ++p) byte = 3 * byte + (b + p * width < m ? codes[b + p * width] : 1);
    out[b] = (u8)byte;
  }
}
// A byte as a fraction of 3**5, of 2**32 parts: the whole part of three times it is a digit, the
// first one first, and the fraction holds the others.
D u32 trits_of(u32 byte) { return byte * 17674763u; }
D u32 trit_at(const u8* data, int m, int i) {
  const int width = (m + 4) / 5, digit = i / width;
  const u32 weight = (u32)(0x511b090301ull >> (8 * digit)) & 255u;  // 3**digit
  return (u32)((u64)(trits_of(data[i - digit * width]) * weight) * 3u >> 32);
}
