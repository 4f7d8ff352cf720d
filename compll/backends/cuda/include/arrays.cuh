// ---- specs that are computed an array at a time: see [Note: CUDA arrays] in cuda_domains.py ----

D i64 quotient(i64 a, i64 b) { return (a | b) >> 32 ? a / b : (i64)((u32)a / (u32)b); }
// out of line: only a piece that crosses 2**32 elements of its tensor comes here
SLOW u64 far_stream(u64 seed, u64 step, u64 tensor, u64 draw, u64 high) {
  return stream(seed, step, tensor, draw, high);
}
// an index clipped to a row of `count`
D i64 inside(i32 i, i64 count) { return i < 0 ? 0 : i < count ? i : count - 1; }

// ---- sums by index: see [Note: sums by index] in numbers.py ----

// the power of two that elements are multiplied by; NO_SUM where one is not finite
#define NO_SUM 4096
D int sum_shift(float largest, i64 n) {
  const int biased = (int)(abs_bits(largest) >> 23);
  return biased == 255 ? NO_SUM : 62 - (64 - __clzll(n)) - (biased > 1 ? biased - 126 : -125);
}
D double two_to(int k) { return __longlong_as_double((i64)(1023 + k) << 52); }
D i64 sum_item(float x, int shift) { return shift == NO_SUM ? 0 : (i64)rint((double)x * two_to(shift)); }
D float sum_value(i64 sum, int shift) {
  return shift == NO_SUM ? NAN_F : (float)((double)sum * two_to(-shift));
}

// lanes u, u + 32, u + 64 and u + 96 of a warp's threads, folded in halves; thread 0 has the sum
D float lane_sum(float a, float b, float c, float d) {
  float sum = (a + c) + (b + d);
  for (int h = 16; h > 0; h >>= 1) sum += __shfl_down_sync(FULL, sum, h, 32);
  return sum;
}
// the code of item i of `count`, packed in tiles of 1024
template <int BITS> D u32 code_in(const u8* data, i64 count, i64 i) {
  const i64 tile = i / 1024, left = count - tile * 1024;
  return code_at<BITS>(data + tile * (128 * BITS), left < 1024 ? (int)left : 1024, (int)(i % 1024));
}

// ---- drawn selections: shared.positions ----
// of a piece: keys, where the circle begins, and how many positions lie beyond its end

D i64 drawn_on_circle(const u64* d, u64 n, u64 count, u64 j) {
  const u64 low = j * n / count, size = (j + 1) * n / count - low;
  const u64 bits = hashed((u32)j * 0x9E3779B9u + (u32)(d[0] >> 32), (u32)d[0]);
  return (i64)(low + (bits * size >> 32) + d[1]);
}
// the position of item j of a selection of `count` of n
D i64 drawn_at(const u64* d, i64 n, i64 count, i64 j) {
  const i64 turned = (i64)d[2], at = j + turned;
  const i64 found = drawn_on_circle(d, (u64)n, (u64)count, (u64)(at < count ? at : at - count));
  return found >= n ? found - n : found;
}
D void draw_positions(u64* d, u64 keys, u64 n, u64 count) {
  const u64 bits = splitmix(keys);
  d[0] = keys;
  d[1] = ((bits >> 32) * n + ((bits & 0xffffffffull) * n >> 32)) >> 32;
  u64 low = 0, high = count;
  while (low < high) {
    const u64 mid = (low + high) / 2;
    if (drawn_on_circle(d, n, count, mid) >= (i64)n) high = mid; else low = mid + 1;
  }
  d[2] = low;
}

// ---- orthonormal columns: see [Note: orthonormal] in matrix_numbers.py ----
// 128 threads; thread l alone reads and writes the elements l, l + 128, ... of every column

D double block_dot(const double* a, const double* b, i64 rows) {
  __shared__ double lanes[128];
  double sum = (int)threadIdx.x < rows ? a[threadIdx.x] * b[threadIdx.x] : 0.0;
  for (i64 i = 128; i < rows; i += 128) {
    const i64 e = i + threadIdx.x;
    sum += e < rows ? a[e] * b[e] : 0.0;
  }
  lanes[threadIdx.x] = sum;
  for (int h = 64; h > 0; h >>= 1) {
    __syncthreads();
    if ((int)threadIdx.x < h) lanes[threadIdx.x] += lanes[threadIdx.x + h];
  }
  __syncthreads();
  const double result = lanes[0];
  __syncthreads();
  return result;
}
// make column c orthogonal to those before it, of length one; false where nothing is left
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

// ---- the Walsh-Hadamard transform: see [Note: hadamard] in matrix_numbers.py ----

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
// what element i of n is multiplied by; 2**top elements are the longest run
D float run_factor(i64 i, i64 n, int top) {
  while (top > 0 && i >= (n >> top << top)) --top;
  return power_of_two(-(top / 2)) * (top % 2 ? 0.70710678118654752f : 1.0f);
}
