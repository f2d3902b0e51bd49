#include "onednn_product.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/capability.h"
#include "cpu/processor.h"
#include "scratch_rows.h"

namespace at::native {
// result = beta result + alpha a b. No header declares it; a torch without it leaves it null.
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result,
                                         float beta, float alpha);
}  // namespace at::native

namespace moe_parallel {
namespace {

// Multiplications of a product. A call of oneDNN takes 8 us longer than one of MKL.
constexpr int64_t kLeast = int64_t{1} << 20;

std::atomic<CpuProducts> chosen{CpuProducts::kWhereFaster};

// Whether oneDNN is chosen for products in which it is, or is not, the faster library.
bool is_chosen(bool is_faster) {
  const auto products = chosen.load();
  return products == CpuProducts::kOneDnn || (products == CpuProducts::kWhereFaster && is_faster);
}

bool has_blocks() { return has_avx512() && at::globalContext().userEnabledMkldnn(); }

#ifdef CPUBLAS_BRGEMM_BF16BF16F32

using at::native::cpublas::brgemm;

// Sizes of the blocks of a wide product [M, K] x [K, N]. oneDNN compiles a kernel for each size of
// a block, so the last block of K, whose size is the number of an expert's rows, is filled up with
// zeros to a multiple of kUnit.
constexpr int64_t kBlockM = 128, kBlockN = 256, kBlockK = 512, kUnit = 32;
constexpr int64_t kColumnsAtOnce = 1024;  // of x whose transposed copy stays in the cache

// out += x^T y for at most kBlockK rows and kColumnsAtOnce columns of x.
void add_block(const at::Tensor& out, const at::Tensor& x, const at::Tensor& y,
               TransposedRows& memory) {
  const int64_t m_size = out.size(0), n_size = out.size(1), rows = x.size(0);
  const int64_t depth = (rows + kUnit - 1) / kUnit * kUnit;
  const auto x_t = memory.of(x);  // up to `depth`, zeros follow its rows
  const auto* left = x_t.const_data_ptr<at::BFloat16>();
  const auto* right = static_cast<const uint16_t*>(y.const_data_ptr());
  auto* sum = out.mutable_data_ptr<float>();
  const int64_t blocks = (n_size + kBlockN - 1) / kBlockN;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> pairs(depth / 2 * std::min(kBlockN, n_size));
    for (int64_t n = begin * kBlockN; n < std::min(n_size, end * kBlockN); n += kBlockN) {
      const int64_t columns = std::min(kBlockN, n_size - n);
      kernels().pair_rows({.rows = right + n,
                           .stride = y.stride(0),
                           .count = rows,
                           .padded = depth,
                           .width = columns,
                           .to = pairs.data()});
      const auto* packed = reinterpret_cast<const at::BFloat16*>(pairs.data());
      for (int64_t m = 0; m < m_size; m += kBlockM) {
        brgemm(std::min(kBlockM, m_size - m), columns, depth, x_t.stride(0), columns, out.stride(0),
               /*add_C=*/true, left + m * x_t.stride(0), packed, sum + m * out.stride(0) + n);
      }
    }
    at::native::cpublas::brgemm_release();
  });
}

#endif

}  // namespace

CpuProducts set_cpu_products(CpuProducts products) { return chosen.exchange(products); }

bool is_fp32_by_onednn(const at::Tensor& a) {
  // Without AVX-512, torch refuses the product in any type.
  if (!a.is_cpu() || a.scalar_type() != at::kFloat || at::native::mkldnn_matmul == nullptr ||
      !has_blocks()) {
    return false;
  }
  return is_chosen(!is_intel());
}

bool multiplies_blocks_by_onednn(ScalarType type) {
  switch (type) {
    case ScalarType::kFloat32:
      return has_blocks() && is_chosen(true);
    case ScalarType::kBFloat16:  // not measured on Intel's processors without AMX
      return has_blocks() && has_avx512_bf16() && is_chosen(!is_intel() || has_amx());
    default:
      return false;
  }
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

bool onednn_add_wide_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
#ifdef CPUBLAS_BRGEMM_BF16BF16F32
  const bool fits = a.is_cpu() && a.scalar_type() == at::kBFloat16 &&
                    out.scalar_type() == at::kFloat && out.stride(1) == 1 && a.stride(0) == 1 &&
                    b.stride(1) == 1;
  if (!fits || !has_blocks() || !is_chosen(!is_intel())) return false;
  const auto x = a.t();
  TransposedRows memory;
  for (int64_t k = 0; k < x.size(0); k += kBlockK) {
    const int64_t rows = std::min(kBlockK, x.size(0) - k);
    for (int64_t m = 0; m < x.size(1); m += kColumnsAtOnce) {
      const int64_t columns = std::min(kColumnsAtOnce, x.size(1) - m);
      add_block(out.narrow(0, m, columns), x.narrow(0, k, rows).narrow(1, m, columns),
                b.narrow(0, k, rows), memory);
    }
  }
  return true;
#else
  return false;
#endif
}

}  // namespace moe_parallel
