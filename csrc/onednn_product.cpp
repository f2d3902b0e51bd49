#include "onednn_product.h"

#include <ATen/Context.h>

#include <atomic>

namespace at::native {
// result = beta result + alpha a b. No header declares it; a torch without it leaves it null.
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result,
                                         float beta, float alpha);
}  // namespace at::native

namespace moe_parallel {
namespace {

// Multiplications of a product. A call of oneDNN takes 8 us longer than one of MKL.
constexpr int64_t kLeast = int64_t{1} << 20;

std::atomic<Fp32Products> chosen{Fp32Products::kWhereFaster};

bool onednn_is_faster() {
#ifdef __x86_64__
  static const bool faster = !__builtin_cpu_is("intel") && __builtin_cpu_supports("avx512f") &&
                             __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vl");
  return faster;
#else
  return false;
#endif
}

}  // namespace

Fp32Products set_fp32_products(Fp32Products products) { return chosen.exchange(products); }

bool is_fp32_by_onednn(const at::Tensor& a) {
  if (!a.is_cpu() || a.scalar_type() != at::kFloat || at::native::mkldnn_matmul == nullptr ||
      !at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  const auto products = chosen.load();
  return products == Fp32Products::kOneDnn ||
         (products == Fp32Products::kWhereFaster && onednn_is_faster());
}

bool onednn_product_out(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                        bool accumulate) {
  if (!is_fp32_by_onednn(a) || out.numel() * a.size(1) < kLeast || out.stride(1) != 1 ||
      out.stride(0) < out.size(1)) {
    return false;
  }
  at::native::mkldnn_matmul(a, b, out, accumulate ? 1 : 0, 1);
  return true;
}

}  // namespace moe_parallel
