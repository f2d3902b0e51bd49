#include "block_product.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cstring>

#include "cpu/capability.h"
#include "cpu/parts.h"
#include "onednn_product.h"

namespace moe_parallel {
namespace {

bool is_onednn(ScalarType type) {
#ifdef CPUBLAS_BRGEMM_F32F32F32
  return multiplies_blocks_by_onednn(type);
#else
  return false;
#endif
}

void multiply_by_aten(const BlockProduct& p) {
  const auto type = p.type == ScalarType::kFloat64 ? at::kDouble : at::kFloat;
  const auto matrix = [&](const void* data, int64_t rows, int64_t columns, int64_t stride) {
    return at::from_blob(const_cast<void*>(data), {rows, columns}, {stride, 1},
                         at::TensorOptions().dtype(type));
  };
  const auto a = matrix(p.a, p.m, p.k, p.a_stride), b = matrix(p.b, p.k, p.n, p.b_stride);
  auto c = matrix(p.c, p.m, p.n, p.c_stride);
  if (p.accumulate) {
    at::addmm_out(c, c, a, b);
  } else {
    at::mm_out(c, a, b);
  }
}

// The same as the kernel transpose_words, for words of another size.
template <class Word>
void transpose(const TransposeWords& task) {
  constexpr int64_t kBand = 16, kBytes = sizeof(Word);
  const auto* from = static_cast<const char*>(task.from);
  for (int64_t row = 0; row < task.padded; row += kBand) {
    const int64_t end = std::min(row + kBand, task.padded);
    const int64_t filled = std::clamp(task.rows, row, end);
    for (int64_t column = 0; column < task.columns; ++column) {
      auto* to = static_cast<char*>(task.to) + column * task.to_stride;
      for (int64_t r = row; r < filled; ++r) {
        std::memcpy(to + r * kBytes, from + r * task.stride + column * kBytes, kBytes);
      }
      std::memset(to + filled * kBytes, 0, (end - filled) * kBytes);
    }
  }
}

}  // namespace

bool has_block_products(ScalarType type) {
  return type == ScalarType::kFloat64 || type == ScalarType::kFloat32 || is_onednn(type);
}

void multiply_blocks(const BlockProduct& p) {
#ifdef CPUBLAS_BRGEMM_F32F32F32
  const auto multiply = [&](auto scalar) {
    using Scalar = decltype(scalar);
    at::native::cpublas::brgemm(p.m, p.n, p.k, p.a_stride, p.b_stride, p.c_stride, p.accumulate,
                                static_cast<const Scalar*>(p.a), static_cast<const Scalar*>(p.b),
                                static_cast<float*>(p.c));
  };
  if (p.type == ScalarType::kBFloat16) return multiply(at::BFloat16{});
  if (is_onednn(p.type)) return multiply(float{});
#endif
  multiply_by_aten(p);
}

void end_block_products() {
#ifdef CPUBLAS_BRGEMM_F32F32F32
  if (is_onednn(ScalarType::kFloat32)) at::native::cpublas::brgemm_release();
#endif
}

void pack_left(const PackedRows& x, void* to) {
  const int64_t bytes = bytes_of(x.type);
  const auto* from = static_cast<const char*>(x.rows);
  auto* target = static_cast<char*>(to);
  for (int64_t row = 0; row < x.count; ++row, target += x.width * bytes) {
    std::memcpy(target, from + row * x.stride * bytes, x.width * bytes);
  }
  std::memset(target, 0, (x.padded - x.count) * x.width * bytes);
}

void pack_right(const PackedRows& x, void* to) {
  if (x.type != ScalarType::kBFloat16) return pack_left(x, to);
  kernels().pair_rows({.rows = static_cast<const uint16_t*>(x.rows),
                       .stride = x.stride,
                       .count = x.count,
                       .padded = x.padded,
                       .width = x.width,
                       .to = static_cast<uint32_t*>(to)});
}

void pack_left_transposed(const PackedRows& x, void* to, int64_t to_stride) {
  const int64_t bytes = bytes_of(x.type);
  const TransposeWords task{.from = x.rows,
                            .stride = x.stride * bytes,
                            .rows = x.count,
                            .padded = x.padded,
                            .columns = x.width,
                            .to = to,
                            .to_stride = to_stride * bytes};
  if (x.type == ScalarType::kFloat32) return kernels().transpose_words(task);
  x.type == ScalarType::kFloat64 ? transpose<uint64_t>(task) : transpose<uint16_t>(task);
}

void pack_right_transposed(const PackedRows& x, void* to, int64_t to_stride) {
  if (x.type != ScalarType::kBFloat16) return pack_left_transposed(x, to, to_stride);
  // Two numbers of a row of x are one word, and two rows of x^T that lie side by side.
  kernels().transpose_words({.from = x.rows,
                             .stride = x.stride * 2,
                             .rows = x.count,
                             .padded = x.padded,
                             .columns = x.width / 2,
                             .to = to,
                             .to_stride = to_stride * 4});
}

}  // namespace moe_parallel
