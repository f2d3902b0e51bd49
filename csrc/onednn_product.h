// Products with results in fp32 by oneDNN, which builds of torch contain.
//
// On x86-64 ATen gives products in fp32 to MKL, and MKL uses its AVX-512 kernels on processors of
// Intel only. On an AMD EPYC of the Zen 5 generation oneDNN is about twice as fast with factors in
// fp32, and four times with factors in bf16. On Intel's processors MKL computes the large products.
// Blocks that stay in the caches are oneDNN's there too: its kernel takes a factor that was
// packed once for many products.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/processor.h"
#include "scalar_type.h"

namespace moe_parallel {

enum class CpuProducts { kBlas, kWhereFaster, kOneDnn };

// Which library computes products with results in fp32 on the CPU, for this process. Returns what
// held before.
CpuProducts set_cpu_products(CpuProducts products);

// Whether oneDNN computes large products of this factor in fp32.
bool is_fp32_by_onednn(const at::Tensor& a);

// Whether oneDNN's kernel multiplies blocks that stay in the caches, with factors of this type,
// which is fp32 or bf16.
bool multiplies_blocks_by_onednn(ScalarType type);

// The number of rows of a product that oneDNN compiles for its sizes: `rows` if they are fewer than
// 8, as when text is generated; a multiple of 8 up to 512, and then one of 32 numbers for each
// doubling. With AMX, 16, which are the rows of a tile, take the place of 8.
inline int64_t rounded_rows(int64_t rows) {
  int64_t step = has_amx() ? 16 : 8;
  if (rows < step) return rows;
  while (rows > 64 * step) step *= 2;
  return (rows + step - 1) / step * step;
}

// out = a b, or out += a b if `accumulate`. Returns false, and computes nothing, if the product is
// ATen's: `a` is not such a factor, the product is small, or `out` has no dense rows.
bool onednn_product_out(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                        bool accumulate);

// out += a b, where out is fp32, a and b are bf16, and a is a transposed view, as in the gradient
// of a weight. The product is not rounded to bf16. Returns false, and computes nothing, if the
// product is not of this kind, or is MKL's.
bool onednn_add_wide_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

}  // namespace moe_parallel
