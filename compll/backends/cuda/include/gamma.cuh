// [Note: gamma quantiles] in quantiles.py, operation by operation. Nothing here may be contracted to
// fused multiply-add.

D double log_gamma(double x) {
  double product = 1.0;
  while (x < 12.0) {
    product *= x;
    x += 1.0;
  }
  const double z = 1.0 / (x * x);
  double p = z * (1.0 / 156.0) - 691.0 / 360360.0;
  p = p * z + 1.0 / 1188.0;
  p = p * z - 1.0 / 1680.0;
  p = p * z + 1.0 / 1260.0;
  p = p * z - 1.0 / 360.0;
  p = p * z + 1.0 / 12.0;
  return (x - 0.5) * d_log(x) - x + 0.9189385332046727 + p / x - d_log(product);
}
D double gamma_density(double shape, double y, double log_of_gamma) {
  return d_exp(shape * y - d_exp(y) - log_of_gamma);
}
D double gamma_series(double shape, double x) {
  double term = 1.0 / shape, total = term;
  for (int k = 1; k < 500; ++k) {
    term *= x / (shape + (double)k);
    total += term;
    if (term < total * 1e-15) break;
  }
  return total;
}
D double gamma_fraction(double shape, double x) {
  double b = x + 1.0 - shape, c = 1e300, d = 1.0 / b, h = d;
  for (int k = 1; k < 500; ++k) {
    const double a = -(double)k * ((double)k - shape);
    b += 2.0;
    d = 1.0 / (a * d + b);
    c = b + a / c;
    h *= c * d;
    if (fabs(c * d - 1.0) < 1e-15) break;
  }
  return h;
}
SLOW double gamma_above(double shape, double p) {
  if (!(0.0 < shape && shape < 1e6 && 0.0 <= p && p <= 1.0)) return D_NAN;
  if (p == 0.0 || p == 1.0) return p == 0.0 ? D_INF : 0.0;
  double low = -690.0, high = d_log(shape + 40.0 * sqrt(shape) + 800.0);
  const double log_of_gamma = log_gamma(shape);
  double y = d_log(shape);
  y = y > low ? y : low;
  for (int turn = 0; turn < 80; ++turn) {
    const double x = d_exp(y);
    const bool below = x < shape + 1.0;
    const double part = below ? gamma_series(shape, x) : gamma_fraction(shape, x);
    const double tail = gamma_density(shape, y, log_of_gamma) * part;
    const double wanted = below ? 1.0 - p : p;
    const double away = d_log(tail / wanted) * part, step = below ? -away : away;
    if (below ? tail < wanted : tail > wanted) low = y; else high = y;
    if (low <= y + step && y + step <= high) {
      y += step;
      if (fabs(step) < 1e-8) break;
    } else {
      y = 0.5 * (low + high);
    }
  }
  return d_exp(y);
}
