// Products of two matrices, or of one pair of matrices after the other.
//
// On the CPU, ATen's products round to the type of their factors. MKL has a product that does not,
// and so has oneDNN; torch's x86-64 builds contain and export both. Without them, the factors are
// converted to the wider type. They are as well on processors whose products in bf16 are slow.
#include "product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <limits>

#include "cpu/processor.h"
#include "launch.h"
#include "onednn_product.h"

extern "C" {
// oneMKL's cblas_gemm_bf16bf16f32 with 32-bit sizes: c = alpha a b + beta c.
__attribute__((weak)) void cblas_gemm_bf16bf16f32(int layout, int transa, int transb, int m, int n,
                                                  int k, float alpha, const void* a, int lda,
                                                  const void* b, int ldb, float beta, float* c,
                                                  int ldc);
}

namespace moe_parallel {
namespace {

constexpr int kRowMajor = 101, kNotTransposed = 111, kTransposed = 112;

// Whether the rows, or the columns, are dense. BLAS accepts either.
bool is_by_rows(const at::Tensor& t) { return t.stride(1) == 1 && t.stride(0) >= t.size(1); }
bool is_by_columns(const at::Tensor& t) { return t.stride(0) == 1 && t.stride(1) >= t.size(0); }

struct Factor {
  at::Tensor tensor;
  int transposed;
  int64_t stride;

  explicit Factor(const at::Tensor& t)
      : tensor(is_by_rows(t) || is_by_columns(t) ? t : t.contiguous()),
        transposed(is_by_rows(tensor) ? kNotTransposed : kTransposed),
        stride(tensor.stride(transposed == kNotTransposed ? 0 : 1)) {}
};

bool mkl_takes(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  const auto fits = [](const at::Tensor& t) {
    return t.numel() > 0 && std::max({t.size(0), t.size(1), t.stride(0), t.stride(1)}) <= kMost;
  };
  return cblas_gemm_bf16bf16f32 != nullptr && a.is_cpu() && a.scalar_type() == at::kBFloat16 &&
         out.scalar_type() == at::kFloat && is_by_rows(out) && fits(out) && fits(a) && fits(b);
}

}  // namespace

bool is_slow_in_bf16(const at::Tensor& a) {
#ifdef __x86_64__
  return !has_avx512() && a.is_cpu() && a.scalar_type() == at::kBFloat16;
#else
  return false;
#endif
}

bool is_compiled_for_its_sizes(const at::Tensor& a) {
  const bool in_bf16 = a.is_cpu() && a.scalar_type() == at::kBFloat16;
  return (in_bf16 && !is_slow_in_bf16(a)) || is_fp32_by_onednn(a);
}

void product_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  if (out.scalar_type() != a.scalar_type()) {
    if (!accumulate) out.zero_();
    add_wide_product(out, a, b);
  } else if (is_slow_in_bf16(a)) {
    const auto left = a.to(at::kFloat), right = b.to(at::kFloat);
    out.copy_(accumulate ? at::addmm(out.to(at::kFloat), left, right) : at::mm(left, right));
  } else if (onednn_product_out(out, a, b, accumulate)) {
    return;
  } else if (accumulate) {
    at::addmm_out(out, out, a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

void add_wide_product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (onednn_add_wide_product(out, a, b)) return;
  if (mkl_takes(out, a, b)) {
    const Factor left(a), right(b);
    cblas_gemm_bf16bf16f32(kRowMajor, left.transposed, right.transposed,
                           static_cast<int>(out.size(0)), static_cast<int>(out.size(1)),
                           static_cast<int>(a.size(1)), 1, left.tensor.const_data_ptr(),
                           static_cast<int>(left.stride), right.tensor.const_data_ptr(),
                           static_cast<int>(right.stride), 1, out.mutable_data_ptr<float>(),
                           static_cast<int>(out.stride(0)));
  } else if (a.is_cuda() && out.scalar_type() == at::kFloat && a.element_size() == 2) {
    at::addmm_out(out, out, a, b, at::kFloat);  // cuBLAS adds to out itself
  } else {
    at::addmm_out(out, out, a.to(out.scalar_type()), b.to(out.scalar_type()));
  }
}

namespace {

// out = a b, or out += a b: [N, I] x [I, O] -> [N, O], or the same with a first dimension for all.
// If out has the wider type of sums, the product is not rounded to the type of a and b.
void product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  const int64_t dims = a.dim();
  TORCH_CHECK_VALUE(dims == 2 || dims == 3, "a must have 2 or 3 dimensions, not ", dims);
  check_dim("b", b, dims);
  check_together(a, {b, out});
  check_same_type("b", b, "a", a);
  TORCH_CHECK_TYPE(out.scalar_type() == a.scalar_type() || out.scalar_type() == sum_type_of(a),
                   "out is ", out.scalar_type(), ", a is ", a.scalar_type(), ": out must be ",
                   sum_type_of(a), " or as a");
  TORCH_CHECK_VALUE(b.size(dims - 2) == a.size(dims - 1), "a has ", a.size(dims - 1),
                    " columns, but b takes ", b.size(dims - 2));
  if (dims == 2) {
    check_sizes("out", out, {a.size(0), b.size(1)});
    product_out(out, a, b, accumulate);
    return;
  }
  check_sizes("b", b, {a.size(0), b.size(1), b.size(2)});
  check_sizes("out", out, {a.size(0), a.size(1), b.size(2)});
  for (int64_t i = 0; i < a.size(0); ++i) {
    auto part = out.select(0, i);
    product_out(part, a.select(0, i), b.select(0, i), accumulate);
  }
}

}  // namespace
}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("product", "(Tensor(a!) out, Tensor a, Tensor b, bool accumulate) -> ()",
                      moe_parallel::product)
