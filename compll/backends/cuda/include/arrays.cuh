// ---- specs that mix elements: see calls.py ----

D i64 quotient(i64 a, i64 b) { return (a | b) >> 32 ? a / b : (i64)((u32)a / (u32)b); }

// An array as a matrix: steps from one row and one column to the next; beyond `valid` elements, zeros.
template <class T> struct View {
  const T* at;
  i64 rows, cols, down, across, valid;
  __device__ __forceinline__ T get(i64 r, i64 c) const {
    const i64 i = r * down + c * across;
    return i < valid ? at[i] : (T)0;
  }
  // the same, by a load without a branch: several are issued together
  __device__ __forceinline__ T load(i64 r, i64 c) const {
    const i64 i = r * down + c * across;
    const T found = at[op_min(i, valid - 1)];
    return i < valid ? found : (T)0;
  }
  __device__ __forceinline__ T get(i64 e) const {
    if (rows == 1 || (across == 1 && down == cols)) return rows == 1 ? get(0, e) : e < valid ? at[e] : (T)0;
    const i64 r = quotient(e, cols);
    return get(r, e - r * cols);
  }
};
// an index, clipped to a row of `count` elements
D i64 inside(i32 i, i64 count) { return i < 0 ? 0 : i < count ? i : count - 1; }
// a product with a short inner dimension: see [Note: order of matrix products]
D float short_product(const View<float>& a, const View<float>& b, i64 e) {
  const i64 r = quotient(e, b.cols), c = e - r * b.cols;
  float total = 0.0f;
  for (i64 k = 0; k < a.cols; ++k) total += a.get(r, k) * b.get(k, c);
  return total;
}

// ---- products: those of numerics/matrices.py, bit for bit ----

#define DEPTH 64
// a thread's elements of one column: `total` plus products of EACH rows of x and the column c of y
template <int EACH> D void add_products(const double (*x)[DEPTH + 1], const float (*y)[COLUMNS], int c, int depth, double* total) {
#pragma unroll 4
  for (int k = 0; k < depth; ++k) {
    const double factor = y[k][c];
#pragma unroll
    for (int s = 0; s < EACH; ++s) total[s] = fma(x[s][k], factor, total[s]);
  }
}
// A block's ROWS x COLUMNS elements, for a chunk of the inner dimension: INNER, DEPTH at a time in shared memory.
// If there are several chunks, their sums are left in `parts`, [chunks, rows, columns].
template <int THREADS, int INNER> D void product(const View<float>& a, const View<float>& b, i64 own, float* out, double* parts) {
  constexpr int MOST = ROWS * COLUMNS / THREADS;
  __shared__ double x[ROWS + MOST][DEPTH + 1];
  __shared__ float y[DEPTH][COLUMNS];
  const i64 across = (b.cols + COLUMNS - 1) / COLUMNS, blocks = (a.rows + ROWS - 1) / ROWS * across;
  const i64 row0 = own % blocks / across * ROWS, col0 = own % across * COLUMNS;
  const i64 chunk = own / blocks, begin = chunk * INNER, end = op_min(a.cols, begin + INNER);
  // `side` threads share a column, and a thread has `each` rows of column c
  const int width = (int)op_min((i64)COLUMNS, b.cols - col0), side = THREADS / width, each = (ROWS + side - 1) / side;
  const int c = threadIdx.x % width, line = threadIdx.x / width, r0 = line * each;
  const bool turned = a.across != 1;
  double total[MOST] = {0.0};
  for (i64 k0 = begin; k0 < end; k0 += DEPTH) {
    const int depth = (int)op_min((i64)DEPTH, end - k0);
#pragma unroll
    for (int s = 0; s < ROWS * DEPTH / THREADS; ++s) {
      const int e = threadIdx.x + s * THREADS, k = turned ? e / ROWS : e % DEPTH, r = turned ? e % ROWS : e / DEPTH;
      x[r][k] = a.load(row0 + r, k0 + k);  // nobody reads what is beyond the ends
    }
#pragma unroll 4
    for (int k = line < side ? line : depth; k < depth; k += side) y[k][c] = b.load(k0 + k, col0 + c);
    __syncthreads();
    if (r0 < ROWS) {
      if (each == 1) add_products<1>(x + r0, y, c, depth, total);
      else if (each <= MOST / 2) add_products<MOST / 2>(x + r0, y, c, depth, total);
      else add_products<MOST>(x + r0, y, c, depth, total);
    }
    __syncthreads();
  }
#pragma unroll
  for (int s = 0; s < MOST; ++s) {
    const i64 r = row0 + r0 + s, at = r * b.cols + col0 + c;
    if (s >= each || r0 + s >= ROWS || r >= a.rows) break;
    if (a.cols > INNER) parts[chunk * a.rows * b.cols + at] = total[s]; else out[at] = (float)total[s];
  }
}
// an element, from the sums of its chunks, `apart` numbers from each other
D float sum_chunks(const double* parts, i64 chunks, i64 apart) {
  double total = 0.0;
#pragma unroll 16
  for (i64 k = 0; k < chunks; ++k) total += parts[k * apart];
  return (float)total;
}

// ---- rows: a warp each, 32 columns at a time ----

// calls `take(there, c, key)` for every column of a row; keys are ordered as unsigned numbers
template <class TAKE> D void each_of_row(const View<float>& x, i64 r, TAKE take) {
  for (i64 c0 = 0; c0 < x.cols; c0 += 32) {
    const i64 c = c0 + threadIdx.x % 32;
    take(c < x.cols, c, digits(op_order_key(c < x.cols ? x.get(r, c) : 0.0f)));
  }
}
// the k-th largest key of a row bit by bit, then positions in order
D void top_columns(const View<float>& x, i64 t, i64 k, i32* out) {
  const bool real = t < x.rows;
  const i64 r = real ? t : x.rows - 1;
  const int u = threadIdx.x % 32;
  const u32 before = (1u << u) - 1u;
  u32 least = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const u32 tried = least | 1u << bit;
    i64 count = 0;
    each_of_row(x, r, [&](bool there, i64, u32 own) { count += __popc(__ballot_sync(FULL, there && own >= tried)); });
    if (count >= k) least = tried;
  }
  i64 ties = k, found = 0;
  each_of_row(x, r, [&](bool there, i64, u32 own) { ties -= __popc(__ballot_sync(FULL, there && own > least)); });
  each_of_row(x, r, [&](bool there, i64 c, u32 own) {
    const u32 equal = __ballot_sync(FULL, there && own == least);
    const bool tied = (equal >> u & 1) && __popc(equal & before) < ties;
    const u32 hits = __ballot_sync(FULL, tied || (there && own > least));
    if (real && (hits >> u & 1)) out[t * k + found + __popc(hits & before)] = (i32)c;
    ties -= __popc(equal);
    found += __popc(hits);
  });
  for (i64 j = found + u; j < k; j += 32)
    if (real) out[t * k + j] = -1;
}
D void place_columns(const View<i32>& at, const View<float>& x, i64 r, i64 cols, float* out) {
  for (i64 j = 0; j < at.cols; ++j) {
    const i32 c = at.get(r, j);
    if (c >= 0 && c < cols) out[r * cols + c] = x.get(r, j);
  }
}

// ---- sums by index: see [Note: sums by index] in numbers.py ----

#define FEW 1024
// Items of a block are added to their sums, of a row of at most FEW in shared memory first: atomics of many
// threads on few numbers wait for each other. Those of 64 bits are loops there, so that sums have two halves.
D void add_items(const View<i32>& index, const View<float>& x, double up, i64 begin, i64 end, u64* sums, i64 size) {
  __shared__ u32 low[FEW], high[FEW];
  const bool few = size <= FEW;
  for (int s = threadIdx.x; few && s < size; s += blockDim.x) low[s] = high[s] = 0;
  __syncthreads();
  for (i64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const u64 y = up == up ? (u64)(i64)rint((double)x.get(i) * up) : 0;
    const i64 to = inside(index.get(i), size);
    if (few) {
      const u32 own = (u32)y, before = atomicAdd(&low[to], own);
      atomicAdd(&high[to], (u32)(y >> 32) + (before + own < own));
    } else {
      atomicAdd(&sums[to], y);
    }
  }
  __syncthreads();
  for (int s = threadIdx.x; few && s < size; s += blockDim.x) {
    const u64 sum = (u64)high[s] << 32 | low[s];
    if (sum) atomicAdd(&sums[s], sum);
  }
}

// ---- drawn selections: shared.positions ----
// for a piece: keys, the start of the circle, and the number of positions beyond its end

// the position of item j of a selection of `count` of n
D i64 drawn_at(const i64* d, i64 n, i64 count, i64 j) {
  const i64 at = j + d[2], found = on_circle(d[0], d[1], n, count, at < count ? at : at - count);
  return found >= n ? found - n : found;
}
D void draw_positions(i64* d, i64 keys, i64 n, i64 count) {
  d[0] = keys, d[1] = circle_start(keys, n);
  i64 low = 0, high = count;
  while (low < high) {
    const i64 mid = (low + high) / 2;
    if (on_circle(d[0], d[1], n, count, mid) >= n) high = mid; else low = mid + 1;
  }
  d[2] = low;
}

// ---- orthonormal columns: see [Note: orthonormal] in numerics/matrices.py ----
// 128 threads; thread l alone reads and writes the elements l, l + 128, ... of every column

D double block_dot(const double* a, const double* b, i64 rows) {
  double sum = (int)threadIdx.x < rows ? a[threadIdx.x] * b[threadIdx.x] : 0.0;
  for (i64 i = 128; i < rows; i += 128) {
    const i64 e = i + threadIdx.x;
    sum += e < rows ? a[e] * b[e] : 0.0;
  }
  return fold_lanes<128>(sum, Sum());
}
// make column c orthogonal to the columns before it, and of length one; false if nothing is left
SLOW bool direction(double* basis, i64 rows, i64 c) {
  double* const v = basis + c * rows;
  const double before = sqrt(block_dot(v, v, rows));
  for (i64 k = 0; k < 2 * c; ++k) {
    const double* const other = basis + (k < c ? k : k - c) * rows;
    const double factor = block_dot(other, v, rows);
#pragma unroll 2
    for (i64 i = threadIdx.x; i < rows; i += 128) v[i] -= factor * other[i];
  }
  const double after = sqrt(block_dot(v, v, rows)), least = 1e-6 * before;
  if (after <= least && isfinite(least)) return false;
#pragma unroll 1
  for (i64 i = threadIdx.x; i < rows; i += 128) v[i] /= after;
  return true;
}

D void fill_column(double* column, const View<float>& x, i64 c, bool zeros) {
#pragma unroll 1
  for (i64 r = threadIdx.x; r < x.rows; r += 128) column[r] = zeros ? 0.0 : (double)x.get(r, c);
}
D void orthonormal(const View<float>& x, const View<float>& spare, bool spared, double* basis, float* out) {
  for (i64 c = 0; c < x.cols; ++c) {
    double* const column = basis + c * x.rows;
    fill_column(column, x, c, false);
    bool found = direction(basis, x.rows, c);
    if (!found && spared) {
      fill_column(column, spare, c, false);
      found = direction(basis, x.rows, c);
    }
    if (!found) fill_column(column, x, c, true);
  }
  for (i64 c = 0; c < x.cols; ++c)
#pragma unroll 1
    for (i64 r = threadIdx.x; r < x.rows; r += 128) out[r * x.cols + c] = (float)basis[c * x.rows + r];
}

// ---- the Walsh-Hadamard transform: see [Note: hadamard] in numerics/matrices.py ----

// R elements, h apart from element `first` of n on: those in runs that are long enough are mixed
template <int R> D void mixed(float* v, i64 first, i64 h, i64 n) {
#pragma unroll
  for (int s = 1; s < R; s *= 2) {
    const i64 end = n & ~(2 * h * s - 1);
#pragma unroll
    for (int k = 0; k < R; ++k) {
      if ((k & s) || first + k * h >= end) continue;
      const float a = v[k], b = v[k | s];
      v[k] = a + b;
      v[k | s] = a - b;
    }
  }
}
// the factor of element i of n; 2**top elements are the longest run
D float run_factor(i64 i, i64 n, int top) {
  if (top < 0) return 1.0f;
  while (top > 0 && i >= (n >> top << top)) --top;
  return op_exp2(-(top / 2)) * (top % 2 ? 0.70710678118654752f : 1.0f);
}
// A block's NEAR elements in shared memory: a gap after every 32 keeps threads off each other's banks.
template <int NEAR, int THREADS> D void stage_near(const View<float>& x, i64 begin, i64 n, float* part) {
  for (int e = threadIdx.x; e < NEAR; e += THREADS) part[e + e / 32] = begin + e < n ? x.get(begin + e) : 0.0f;
}
template <int NEAR, int THREADS, int H, int R> D void mix_near(i64 begin, i64 n, float* part) {
  __syncthreads();
  for (int t = threadIdx.x; t < NEAR / R; t += THREADS) {
    const int b = t / H * (H * R) + t % H;
    float v[R];
#pragma unroll
    for (int k = 0; k < R; ++k) v[k] = part[b + k * H + (b + k * H) / 32];
    mixed<R>(v, begin + b, H, n);
#pragma unroll
    for (int k = 0; k < R; ++k) part[b + k * H + (b + k * H) / 32] = v[k];
  }
}
template <int NEAR, int THREADS> D void leave_near(i64 begin, i64 n, int top, const float* part, float* out) {
  __syncthreads();
  for (int e = threadIdx.x; e < NEAR && begin + e < n; e += THREADS)
    out[begin + e] = part[e + e / 32] * run_factor(begin + e, n, top);
}
// Elements h apart, and multiples of that; by `blocks` blocks.
template <int THREADS, int R> D void mix_far(float* x, i64 n, i64 own, i64 blocks, i64 h, int top) {
  const i64 groups = (n + h * R - 1) / (h * R) * h;
  for (i64 t = own * THREADS + threadIdx.x; t < groups; t += blocks * THREADS) {
    const i64 b = t / h * (h * R) + t % h;
    float v[R];
#pragma unroll
    for (int k = 0; k < R; ++k) v[k] = b + k * h < n ? x[b + k * h] : 0.0f;
    mixed<R>(v, b, h, n);
#pragma unroll
    for (int k = 0; k < R; ++k) if (b + k * h < n) x[b + k * h] = v[k] * run_factor(b + k * h, n, top);
  }
}
// systematic sampling of a row of chances, by one thread: see matrices.chosen
D void choose(const View<float>& chances, i64 element, i64 keys, i64 most, i32* out) {
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
