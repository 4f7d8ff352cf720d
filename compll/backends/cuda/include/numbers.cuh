// Numbers, for generated CUDA kernels. A host compiler compiles them too: the tests run kernels that way.
// The functions of compll/numerics follow (see instructions.py).

typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
#define D static __device__ __forceinline__
#define SLOW static __device__ __noinline__
#define FULL 0xffffffffu
#define NAN_F __int_as_float(0x7fc00000)
#define D_INF __longlong_as_double(0x7ff0000000000000ll)
#define D_NAN __longlong_as_double(0x7ff8000000000000ll)

// Instructions of tile programs that are operators of C++, for each kind: float and i32 (lanes and
// tiles), double and i64 (a piece). Integers wrap around.
#define WHOLE_NUMBERS(I, U)                         \
  D I op_add(I a, I b) { return (I)((U)a + (U)b); } \
  D I op_sub(I a, I b) { return (I)((U)a - (U)b); } \
  D I op_mul(I a, I b) { return (I)((U)a * (U)b); } \
  D I op_neg(I a) { return (I)((U)0 - (U)a); }
WHOLE_NUMBERS(i32, u32)
WHOLE_NUMBERS(i64, u64)
#undef WHOLE_NUMBERS
#define FLOATS(F, suffix)                        \
  D F op_add(F a, F b) { return a + b; }         \
  D F op_sub(F a, F b) { return a - b; }         \
  D F op_mul(F a, F b) { return a * b; }         \
  D F op_neg(F a) { return -a; }                 \
  D F op_floor(F a) { return floor##suffix(a); } \
  D F op_ceil(F a) { return ceil##suffix(a); }   \
  D F op_round(F a) { return rint##suffix(a); }  \
  D F op_sqrt(F a) { return sqrt##suffix(a); }
FLOATS(float, f)
FLOATS(double, )
#undef FLOATS
// computes both values: divergent branches take longer
template <class T> D T op_where(bool c, T a, T b) { return c ? a : b; }

// what a device does by instructions of its own
#ifdef __CUDA_ARCH__
D i32 op_code(float x, i32 top) {
  if (top == 255) {
    u32 byte;  // a byte's own conversion ends at 0 and 255
    asm("cvt.rzi.sat.u8.f32 %0, %1;" : "=r"(byte) : "f"(x));
    return (i32)byte;
  }
  const u32 code = __float2uint_rz(x);  // 0 for NaN and below 0
  return (i32)(code < (u32)top ? code : (u32)top);
}
D i32 op_code(i32 x, i32 top) { x = x > 0 ? x : 0; return x < top ? x : top; }
D i32 op_code(bool x, i32) { return x; }
D i32 float16_bits(float x) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  const i32 raw = __float_as_int(x);
  return x != x ? 0x7e00 | (raw >> 16 & 0x8000) | (raw >> 13 & 0x3ff) : (i32)h;
}
D float float16_value(i32 h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)h));
  return x;
}
#endif
