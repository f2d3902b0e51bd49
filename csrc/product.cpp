// A product of two matrices, or of one pair of matrices after the other.
#include "grouped_gemm_wide.h"
#include "launch.h"

namespace moe_parallel {
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
