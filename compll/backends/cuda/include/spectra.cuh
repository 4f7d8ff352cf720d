// [Note: CUDA singular vectors] The vectors of a matrix's shorter side are the eigenvectors of its Gram
// matrix, found by Jacobi's method in float64, a block for each piece. The products of the matrix with
// them have the singular values as lengths; divided by their lengths they are the vectors of the longer
// side. Products are computed on each read. So values below 1e-8 of the largest, and their vectors of the
// longer side, have no true digits for any shape: see [Note: singular vectors] in spectra.py. The
// last bits, and the vectors' signs, differ from those of the other backends.

#define LONG 4096        // of the longer side, that a block adds up for the Gram matrix
#define TALL (16 * ROWS)  // and for lengths
template <int THREADS> D void gram_part(const View<float>& m, i64 own, double* parts) {
  __shared__ float x[ROWS][DEPTH + 1], y[DEPTH][COLUMNS];
  const i64 r = m.shorter(), l = m.longer(), across = (r + COLUMNS - 1) / COLUMNS, each = (r + ROWS - 1) / ROWS * across;
  const i64 part = own / each, begin = part * LONG, end = l - begin < LONG ? l : begin + LONG;
  const i64 row0 = own % each / across * ROWS, col0 = own % each % across * COLUMNS;
  const int width = block_width(col0, r);
  double total[ROWS * COLUMNS / THREADS] = {0.0};
  accumulate<THREADS>(total, begin, end, width, x, y, m.tall(),
    [&](i64 k, int s) { return row0 + s < r ? m.side(k, row0 + s) : 0.0f; },
    [&](i64 k, int s) { return m.side(k, col0 + s); });
  each_total<THREADS>(total, width, [&](double sum, int i, int j) {
    if (row0 + i < r) parts[(part * r + row0 + i) * r + col0 + j] = sum;
  });
}
D void gram_sums(const View<float>& m, const double* parts, double* gram) {
  const i64 all = m.shorter() * m.shorter();
  for (i64 i = threadIdx.x; i < all; i += blockDim.x) {
    double sum = 0.0;
    for (i64 k = 0; k * LONG < m.longer(); ++k) sum += parts[k * all + i];
    gram[i] = sum;
  }
}
// The squares of products of TALL of the longer side with the vectors of a block, a row each, added up.
template <int THREADS> D void square_part(const View<float>& m, i64 own, const double* vectors, double* parts) {
  __shared__ float x[ROWS][DEPTH + 1];
  __shared__ double y[DEPTH][COLUMNS];
  const i64 r = m.shorter(), l = m.longer(), across = (r + COLUMNS - 1) / COLUMNS;
  const i64 begin = own / across * TALL, last = l - begin < TALL ? l : begin + TALL, col0 = own % across * COLUMNS;
  const int width = block_width(col0, r);
  double squares[(COLUMNS + THREADS - 1) / THREADS] = {0.0};
  for (i64 row0 = begin; row0 < last; row0 += ROWS) {
    double total[ROWS * COLUMNS / THREADS] = {0.0};
    accumulate<THREADS>(total, 0, r, width, x, y, false,
      [&](i64 k, int i) { return row0 + i < last ? m.side(row0 + i, k) : 0.0f; },
      [&](i64 k, int c) { return vectors[(col0 + c) * r + k]; });
    each_total<THREADS>(total, width, [&](double sum, int i, int c) { y[i][c] = sum; });
    __syncthreads();
    for (int c = threadIdx.x, s = 0; c < width; c += THREADS, ++s)
      for (int i = 0; i < ROWS && row0 + i < last; ++i) squares[s] += y[i][c] * y[i][c];
    __syncthreads();
  }
  for (int c = threadIdx.x, s = 0; c < width; c += THREADS, ++s) parts[own / across * r + col0 + c] = squares[s];
}
// element e of the vectors of one side, `cols` of them: of the shorter side, or of a product with such a one
template <bool LEFT> D float vector_at(const View<float>& m, const double* vectors, const double* lengths, const i32* order, i64 e, i64 cols) {
  const i64 row = quotient(e, cols), o = order[e - row * cols], r = m.shorter();
  const double* const vector = vectors + o * r;
  if (m.tall() != LEFT) return (float)vector[row];
  double found = 0.0;
  for (i64 k = 0; k < r; ++k) found += (double)m.side(row, k) * vector[k];
  return (float)(found / (lengths[o] > 0.0 ? lengths[o] : 1.0));
}

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
// r + 1 numbers. If the trace is not finite, all are NaN.
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
D void by_length(const double* parts, const View<float>& m, double* lengths, i32* order) {
  const i64 count = (m.longer() + TALL - 1) / TALL, r = m.shorter();
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
// systematic sampling of a row of chances, by one thread: see spectra.chosen
D void choose(const View<float>& chances, u32 element, u64 keys, i64 most, i32* out) {
  const float u = uniform(element, keys);
  double line = 0.0, last = ceil(0.0 - (double)u);
  i64 taken = 0;
  for (i64 i = 0; i < most; ++i) out[i] = -1;
  for (i64 i = 0; i < chances.cols; ++i) {
    const float chance = chances.get(0, i);
    line += chance > 0.0f ? (chance < 1.0f ? (double)chance : 1.0) : 0.0;
    const double step = ceil(line - (double)u);
    if (step > last && taken < most) out[taken++] = (i32)i;
    last = step;
  }
}
