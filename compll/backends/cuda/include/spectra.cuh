// ---- singular vectors: see [Note: CUDA singular vectors] in cuda_spectra.py ----

// pair k of a turn in which each of m players (an even number) meets another
D void meeting(i64 m, i64 turn, i64 k, i64* p, i64* q) {
  const i64 a = k ? (turn + k) % (m - 1) : m - 1, b = (turn - k + m - 1) % (m - 1);
  *p = a < b ? a : b;
  *q = a < b ? b : a;
}
// cosine and sine of the rotation that makes two rows of the symmetric g orthogonal; false if they are
D bool rotation(const double* g, i64 r, i64 p, i64 q, double least, double* cs) {
  const double a = g[p * r + p], b = g[q * r + q], both = g[p * r + q];
  cs[0] = 1.0;
  cs[1] = 0.0;
  if (!(fabs(both) > 1e-15 * sqrt(fabs(a) * fabs(b)) + least)) return false;
  const double tau = (b - a) / (2.0 * both);
  const double t = (tau < 0.0 ? -1.0 : 1.0) / (fabs(tau) + sqrt(1.0 + tau * tau));
  cs[0] = 1.0 / sqrt(1.0 + t * t);
  cs[1] = t * cs[0];
  return true;
}
D void turned(double* x, double* y, const double* cs) {
  const double a = *x, b = *y;
  *x = cs[0] * a - cs[1] * b;
  *y = cs[1] * a + cs[0] * b;
}
// Jacobi's method by a block: rows of v become the eigenvectors of the symmetric g [r, r]. cs holds
// r + 1 numbers. Where the trace is not finite, all are NaN.
SLOW void eigenvectors(double* g, double* v, double* cs, i64 r) {
  __shared__ int moved;
  const i64 m = r + r % 2, pairs = m / 2;
  double trace = 0.0;
  for (i64 i = 0; i < r; ++i) trace += g[i * r + i];
  const bool good = isfinite(trace);
  for (i64 e = threadIdx.x; e < r * r; e += blockDim.x)
    v[e] = good ? (e / r == e % r ? 1.0 : 0.0) : trace - trace;
  for (int sweep = 0; good && sweep < 40; ++sweep) {
    __syncthreads();
    if (threadIdx.x == 0) moved = 0;
    for (i64 turn = 0; turn < m - 1; ++turn) {
      __syncthreads();
      for (i64 k = threadIdx.x; k < pairs; k += blockDim.x) {
        i64 p, q;
        meeting(m, turn, k, &p, &q);
        cs[2 * k] = 1.0;
        cs[2 * k + 1] = 0.0;
        if (q < r && rotation(g, r, p, q, 1e-18 * trace, cs + 2 * k)) moved = 1;
      }
      __syncthreads();
      for (i64 e = threadIdx.x; e < pairs * r; e += blockDim.x) {
        i64 p, q;
        meeting(m, turn, e / r, &p, &q);
        const double* const c = cs + 2 * (e / r);
        if (c[1] == 0.0) continue;
        turned(g + p * r + e % r, g + q * r + e % r, c);
        turned(v + p * r + e % r, v + q * r + e % r, c);
      }
      __syncthreads();
      for (i64 e = threadIdx.x; e < pairs * r; e += blockDim.x) {
        i64 p, q;
        meeting(m, turn, e / r, &p, &q);
        const double* const c = cs + 2 * (e / r);
        if (c[1] != 0.0) turned(g + e % r * r + p, g + e % r * r + q, c);
      }
    }
    __syncthreads();
    if (!moved) return;
  }
}
// lengths become the roots of sums of `count` parts each; order[i] is the i-th longest (ties: the first)
D void by_length(const double* parts, i64 count, i64 r, double* lengths, i32* order) {
  for (i64 c = threadIdx.x; c < r; c += blockDim.x) {
    double sum = 0.0;
    for (i64 k = 0; k < count; ++k) sum += parts[k * r + c];
    lengths[c] = sqrt(sum);
  }
  __syncthreads();
  for (i64 c = threadIdx.x; c < r; c += blockDim.x) {
    i64 place = 0;
    for (i64 o = 0; o < r; ++o)
      place += lengths[o] > lengths[c] || (!(lengths[c] > lengths[o]) && o < c);
    order[place] = (i32)c;
  }
}
// systematic sampling of `count` chances, by one thread: see spectra.chosen
struct Sampler {
  double line, last;
  i64 taken;
};
D Sampler sampler(float u) { return {0.0, ceil(0.0 - (double)u), 0}; }
D void sample_next(Sampler* s, float chance, float u, i64 at, i64 most, i32* out) {
  const double p = chance > 0.0f ? (chance < 1.0f ? (double)chance : 1.0) : 0.0;
  s->line += p;
  const double step = ceil(s->line - (double)u);
  if (step > s->last && s->taken < most) out[s->taken++] = (i32)at;
  s->last = step;
}
