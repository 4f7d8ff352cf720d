// What elementary functions are made of (see elementary.py): a float64's mantissa in [0.5, 1) and exponent,
// and powers of two.

#define D_INF __longlong_as_double(0x7ff0000000000000ll)
#define D_NAN __longlong_as_double(0x7ff8000000000000ll)
D bool tiny(double x) { return fabs(x) < 2.2250738585072014e-308; }
D i64 normal_bits(double x) { return __double_as_longlong(tiny(x) ? x * 18014398509481984.0 : x); }
D double mantissa(double x) {
  return __longlong_as_double((normal_bits(x) & ((1ll << 52) - 1)) | (1022ll << 52));
}
D double exponent(double x) { return (double)((normal_bits(x) >> 52 & 2047) - 1022) - (tiny(x) ? 54.0 : 0.0); }
D double power_of_two(double k) { return __longlong_as_double(((i64)k + 1023) << 52); }

// ---- exponents and trits ----

D i32 exponent(float x) { return (i32)((u32)__float_as_int(x) >> 23 & 255u) - 127; }
D float power_inside(i32 i) { return __int_as_float((i32)((u32)(i + 127) << 23)); }  // of -127..128
D float power_of_two(i32 i) { return power_inside(op_min(op_max(i, -127), 128)); }
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
