// States of 16 bits: [Note: 16-bit states] in halves.py. Their elements convert to float.

struct Bfloat16 {
  u16 word;
  D float value(u16 w) { return bfloat16_value(w); }
  D u16 bits(float x) { return bfloat16_bits(x); }
  __device__ __forceinline__ operator float() const { return value(word); }
};
struct Float16 {
  u16 word;
  D float value(u16 w) { return float16_value(w); }
  D u16 bits(float x) { return float16_bits(x); }
  __device__ __forceinline__ operator float() const { return value(word); }
};

// what an element is that has the value `before` and is given y
template <class T> D float taken_up(float y, float before) {
  const float rounded = T::value(T::bits(y));
  return finite(rounded) ? rounded : before;
}
template <class T> D void put1(T* x, i64 i, float y) { x[i].word = T::bits(y); }
template <class T> D void keep1(T* x, i64 i, float y) {
  const u16 word = T::bits(y);
  if (finite(T::value(word))) x[i].word = word;
}

// four elements at i of n (zero beyond): one access where address and length allow it
template <class T> SLOW Pair load_words(const T* x, int count) {
  Pair q = {{0, 0}};
  for (int j = 0; j < 4; ++j) if (j < count) q.v[j >> 1] |= (u32)x[j].word << (16 * (j & 1));
  return q;
}
template <class T> SLOW void keep_slow(T* x, int count, Quad q) {
  for (int j = 0; j < 4; ++j) if (j < count) keep1(x, j, __int_as_float((i32)q.v[j]));
}
template <class T> D void load4(const T* x, i64 i, int count, float* v) {
  const Pair q = count >= 4 && aligned(x + i, 8) ? *(const Pair*)(x + i) : load_words(x + i, count);
  for (int j = 0; j < 4; ++j) v[j] = T::value((u16)(q.v[j >> 1] >> (16 * (j & 1))));
}
template <class T> D void keep4(T* x, i64 i, int count, const float* v) {
  Pair q;
  bool all = true;
  for (int j = 0; j < 4; ++j) {
    const u16 word = T::bits(v[j]);
    all = all && finite(T::value(word));
    q.v[j >> 1] = j & 1 ? q.v[j >> 1] | (u32)word << 16 : word;
  }
  if (all && count >= 4 && aligned(x + i, 8)) *(Pair*)(x + i) = q;
  else keep_slow(x + i, count, quad_of(v));
}
