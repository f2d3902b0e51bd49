// AoE's selection. The products C = x W are never kept: they are made tile by tile of tokens,
// once for the norms and once more for the gradient.
#include "norm_topk.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>

#include "launch.h"

namespace moe_parallel {
namespace {

constexpr int64_t kTileBytes = int64_t{16} << 20;  // of C
constexpr int64_t kTileMinTokens = 64;             // below this a product is no faster

void check_product(const at::Tensor& x, const at::Tensor& w) {
  check_dim("x", x, 2);
  check_dim("w", w, 3);
  TORCH_CHECK_VALUE(w.size(1) == x.size(1), "x has ", x.size(1), " columns, but w takes ",
                    w.size(1));
  check_together(x, {w});
  TORCH_CHECK_TYPE(w.scalar_type() == x.scalar_type(), "x is ", x.scalar_type(), ", w is ",
                   w.scalar_type());
}

// All experts' matrices side by side: [E, D, R] -> [D, E R].
at::Tensor concatenate(const at::Tensor& w) {
  return w.permute({1, 0, 2}).reshape({w.size(1), w.size(0) * w.size(2)});
}

// body(first, tokens, c) for every tile, with c = x[tile] w_cat in a buffer that is used again.
template <class Body>
void for_each_tile(const at::Tensor& x, const at::Tensor& w_cat, const Body& body) {
  const int64_t token_bytes = std::max<int64_t>(w_cat.size(1) * w_cat.element_size(), 1);
  const int64_t tile =
      std::min(std::max(kTileBytes / token_bytes, kTileMinTokens), std::max<int64_t>(x.size(0), 1));
  auto buffer = x.new_empty({tile, w_cat.size(1)});
  for (int64_t first = 0; first < x.size(0); first += tile) {
    const int64_t tokens = std::min(tile, x.size(0) - first);
    auto c = buffer.narrow(0, 0, tokens);
    at::mm_out(c, x.narrow(0, first, tokens), w_cat);
    body(first, tokens, c);
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> norm_topk(const at::Tensor& x, const at::Tensor& w, int64_t k) {
  check_product(x, w);
  const int64_t num_experts = w.size(0);
  TORCH_CHECK_VALUE(1 <= k && k <= num_experts, "k must lie in 1..", num_experts,
                    " (the number of experts), not ", k);

  const auto norms = at::empty({x.size(0), num_experts}, x.options().dtype(sum_type_of(x)));
  for_each_tile(x, concatenate(w), [&](int64_t first, int64_t tokens, const at::Tensor& c) {
    launch(x, GroupNorms{.type = scalar_type_of("x", x),
                         .c = c.const_data_ptr(),
                         .norms = norms.narrow(0, first, tokens).mutable_data_ptr(),
                         .tokens = tokens,
                         .num_experts = num_experts,
                         .rank = w.size(2)});
  });
  auto experts = at::empty({x.size(0), k}, x.options().dtype(at::kLong));
  launch(x, SelectTopK{.type = scalar_type_of("norms", norms),
                       .norms = norms.const_data_ptr(),
                       .experts = experts.mutable_data_ptr<int64_t>(),
                       .tokens = x.size(0),
                       .num_experts = num_experts,
                       .k = k});
  return {norms, experts};
}

// dC[t, e] = dnorms[t, e] / norms[t, e] * C[t, e], and 0 where the norm is 0.
std::tuple<at::Tensor, at::Tensor> norm_topk_backward(const at::Tensor& dnorms, const at::Tensor& x,
                                                      const at::Tensor& w,
                                                      const at::Tensor& norms) {
  check_product(x, w);
  check_together(x, {dnorms, norms});
  TORCH_CHECK_VALUE(dnorms.sizes() == norms.sizes(), "dnorms have shape ", dnorms.sizes(),
                    ", norms ", norms.sizes());

  const auto factors = (dnorms / norms).masked_fill_(norms == 0, 0).to(sum_type_of(x)).contiguous();
  const auto w_cat = concatenate(w);
  auto dx = at::empty(x.sizes(), x.options());
  // Tiles add up in the type of sums, so that bf16 is rounded to once.
  auto dw_cat = at::zeros(w_cat.sizes(), w.options().dtype(sum_type_of(w)));
  for_each_tile(x, w_cat, [&](int64_t first, int64_t tokens, const at::Tensor& c) {
    launch(x, GroupScale{.type = scalar_type_of("x", x),
                         .c = c.mutable_data_ptr(),
                         .factors = factors.narrow(0, first, tokens).const_data_ptr(),
                         .tokens = tokens,
                         .num_experts = w.size(0),
                         .rank = w.size(2)});
    auto dx_tile = dx.narrow(0, first, tokens);
    at::mm_out(dx_tile, c, w_cat.t());
    const auto x_tile_t = x.narrow(0, first, tokens).t();
    if (dw_cat.scalar_type() == x.scalar_type()) {
      dw_cat.addmm_(x_tile_t, c);
    } else {
      dw_cat.add_(at::mm(x_tile_t, c));
    }
  });
  const auto dw = dw_cat.view({w.size(1), w.size(0), w.size(2)}).permute({1, 0, 2});
  return {dx, dw.to(w.scalar_type()).contiguous()};
}

}  // namespace moe_parallel

MOE_PARALLEL_IMPLEMENT("norm_topk", moe_parallel::norm_topk)
MOE_PARALLEL_IMPLEMENT("norm_topk_backward", moe_parallel::norm_topk_backward)
