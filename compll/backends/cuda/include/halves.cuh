// States of 16 bits: [Note: 16-bit states] in halves.py. Their elements convert to float.

struct Bfloat16 {
  u16 word;
  D float value(u16 w) { return bfloat16_value(w); }
  D u16 bits(float x) { return (u16)bfloat16_bits(x); }
  __device__ __forceinline__ operator float() const { return value(word); }
};
struct Float16 {
  u16 word;
  D float value(u16 w) { return float16_value(w); }
  D u16 bits(float x) { return (u16)float16_bits(x); }
  __device__ __forceinline__ operator float() const { return value(word); }
};

D float load1(const Bfloat16* x, i64 i) { return x[i]; }
D float load1(const Float16* x, i64 i) { return x[i]; }
template <class T> D void keep1(T* x, i64 i, float y) {
  const u16 word = T::bits(y);
  if (op_isfinite(T::value(word))) x[i].word = word;
}

// four elements at i of n (zero beyond)
template <bool READY, class T> D void load4(const T* x, i64 i, int count, float* v) {
  if (!READY) {
    for (int j = 0; j < 4; ++j) v[j] = j < count ? (float)x[i + j] : 0.0f;
    return;
  }
  const Pair q = *(const Pair*)(x + i);
  for (int j = 0; j < 4; ++j) v[j] = T::value((u16)(q.v[j >> 1] >> (16 * (j & 1))));
}
template <bool READY, class T> D void keep4(T* x, i64 i, int count, const float* v) {
  Pair q;
  bool all = READY;
  for (int j = 0; j < 4; ++j) {
    const u16 word = T::bits(v[j]);
    all = all && op_isfinite(T::value(word));
    q.v[j >> 1] = j & 1 ? q.v[j >> 1] | (u32)word << 16 : word;
  }
  if (all) *(Pair*)(x + i) = q;
  else for (int j = 0; j < 4; ++j) if (j < count) keep1(x, i + j, v[j]);
}
