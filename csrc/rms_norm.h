#pragma once

#include <cstdint>

#include "scalar_type.h"

namespace moe_parallel {

// r[n] = 1 / sqrt(mean(x[n]^2) + eps); y[n] = x[n] r[n] weight. Everything between x and y is in
// the type of sums.
struct RmsNorm {
  ScalarType type;     // of x and y
  const void* x;       // [rows, width]
  const void* weight;  // [width] in the type of sums
  void* y;             // [rows, width]
  void* r;             // [rows] in the type of sums
  int64_t rows;
  int64_t width;
  double eps;
};

// Rows of a part, each of which sums its own gradient of the weight. The number does not depend on
// the threads, and neither does a bit of the result.
constexpr int64_t kRmsNormRows = 64;

// With z = x r and g = dy * weight: dx = r (g - z mean(g z)), and dweight is the sum of dy z.
struct RmsNormBackward {
  ScalarType type;     // of dy, x and dx
  const void* dy;      // [rows, width]
  const void* x;       // [rows, width]
  const void* weight;  // [width] in the type of sums
  const void* r;       // [rows] in the type of sums
  void* dx;            // [rows, width]
  void* dweights;      // [parts, width] in the type of sums: the sum over each part's rows
  int64_t rows;
  int64_t width;

  int64_t parts() const { return (rows + kRmsNormRows - 1) / kRmsNormRows; }
};

void run_on_cpu(const RmsNorm& task);
void run_on_cpu(const RmsNormBackward& task);

}  // namespace moe_parallel
