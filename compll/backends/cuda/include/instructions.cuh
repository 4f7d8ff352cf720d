// Instructions of tile programs that are not operators of C++, for each kind: float and i32 (lanes and
// tiles), double and i64 (a piece). Integers wrap around.

#define WHOLE_NUMBERS(I, U)                                                             \
  D I op_add(I a, I b) { return (I)((U)a + (U)b); }                                     \
  D I op_sub(I a, I b) { return (I)((U)a - (U)b); }                                     \
  D I op_mul(I a, I b) { return (I)((U)a * (U)b); }                                     \
  D I op_neg(I a) { return (I)((U)0 - (U)a); }                                          \
  D I op_abs(I a) { return a < 0 ? op_neg(a) : a; }                                     \
  D I op_shl(I a, I b) { return (U)b < 8 * sizeof(I) ? (I)((U)a << b) : 0; }            \
  D I op_shr(I a, I b) { return a >> ((U)b < 8 * sizeof(I) ? b : (I)(8 * sizeof(I) - 1)); } \
  D I op_floordiv(I a, I b) {                                                           \
    if (b == 0 || b == -1) return b ? op_neg(a) : 0;                                    \
    return a / b - ((a % b != 0) && ((a < 0) != (b < 0)));                              \
  }
WHOLE_NUMBERS(i32, u32)
WHOLE_NUMBERS(i64, u64)
#undef WHOLE_NUMBERS

#define FLOATS(F, suffix)                                      \
  D F op_add(F a, F b) { return a + b; }                       \
  D F op_sub(F a, F b) { return a - b; }                       \
  D F op_mul(F a, F b) { return a * b; }                       \
  D F op_neg(F a) { return -a; }                               \
  D F op_abs(F a) { return fabs##suffix(a); }                  \
  D F op_floor(F a) { return floor##suffix(a); }               \
  D F op_ceil(F a) { return ceil##suffix(a); }                 \
  D F op_round(F a) { return rint##suffix(a); }                \
  D F op_sqrt(F a) { return sqrt##suffix(a); }                 \
  D F op_floordiv(F a, F b) { return floor##suffix(a / b); }   \
  D F op_float16(F a) { return (F)float16((float)a); }         \
  D F op_bfloat16(F a) { return (F)bfloat16((float)a); }       \
  D F op_bfloat16_up(F a) { return (F)bfloat16_up((float)a); } \
  D F op_float8_e4m3(F a) { return (F)float8_e4m3((float)a); } \
  D F op_float32(F a) { return (F)(float)a; }
FLOATS(float, f)
FLOATS(double, )
#undef FLOATS

// computes both values: divergent branches take longer
template <class T> D T op_where(bool c, T a, T b) { return c ? a : b; }
D bool op_isfinite(float a) { return finite(a); }
D bool op_isfinite(double a) { return isfinite(a); }
D i32 op_trunc(float a) { return i_trunc(a); }
D i64 op_trunc(double a) { return (i64)a; }
D i32 op_exponent(float a) { return exponent(a); }
D i64 op_exponent(double a) { return exponent((float)a); }
D float op_exp2(i32 a) { return power_of_two(a); }
D double op_exp2(i64 a) { return power_of_two((i32)op_min(op_max(a, -127ll), 128ll)); }
D i32 op_float_bits(float a) { return __float_as_int(a); }
D i64 op_float_bits(double a) { return __float_as_int((float)a); }
D float op_from_float_bits(i32 a) { return __int_as_float(a); }
D double op_from_float_bits(i64 a) { return __int_as_float((i32)a); }
D i64 op_as_count(double a, i64 n) { return as_count(a, n); }
D i64 op_as_count(i64 a, i64 n) { return as_count((double)a, n); }
D i32 op_code(float a, i32 top) { return (i32)f_code(a, (u32)top); }
D i32 op_code(i32 a, i32 top) { return (i32)i_code(a, top); }
D i32 op_code(bool a, i32) { return a; }
