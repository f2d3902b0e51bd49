// AoE's selection. C = x W of all experts is computed in tiles of tokens. The caller specifies what
// is kept: nothing, the C of the chosen experts, or the C of all experts, which the backward pass
// then need not recompute.
#include "norm_topk.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "fused_gemm.h"
#include "grouped_gemm_wide.h"
#include "launch.h"
#include "scratch_rows.h"

namespace moe_parallel {
namespace {

// Of C on the CPU. The backward pass also reads W again, and reads and writes dW, for each tile.
constexpr int64_t kTileBytes = int64_t{16} << 20;
constexpr int64_t kBackwardTileBytes = int64_t{32} << 20;
constexpr int64_t kCudaTileBytes = int64_t{32} << 20;  // fits in the L2 cache of an A100
constexpr int64_t kTileMinTokens = 64;                 // smaller products are no faster

void check_product(const at::Tensor& x, const at::Tensor& w) {
  check_dim("x", x, 2);
  check_dim("w", w, 3);
  TORCH_CHECK_VALUE(w.size(1) == x.size(1), "x has ", x.size(1), " columns, but w takes ",
                    w.size(1));
  check_together(x, {w});
  check_same_type("w", w, "x", x);
}

// Checks the C of some experts of each token, or its gradient.
void check_product_of(const char* name, const at::Tensor& c, const at::Tensor& x, int64_t experts,
                      int64_t rank) {
  check_together(x, {c});
  check_sizes(name, c, {x.size(0), experts, rank});
  check_same_type(name, c, "x", x);
}

// The matrices of all experts side by side: [E, D, R] -> [D, E R].
at::Tensor concatenate(const at::Tensor& w) {
  return w.permute({1, 0, 2}).reshape({w.size(1), w.size(0) * w.size(2)});
}

// The tiles of tokens, and memory for the columns that are computed from one tile.
class Tiles {
 public:
  Tiles(const at::Tensor& x, int64_t columns, int64_t bytes_on_cpu)
      : tokens_(x.size(0)),
        tile_(tokens_of_tile(x, columns, x.is_cuda() ? kCudaTileBytes : bytes_on_cpu)),
        memory_(x, tile_, columns) {}

  // Calls body(first, tokens) for every tile.
  template <class Body>
  void for_each(const Body& body) const {
    for (int64_t first = 0; first < tokens_; first += tile_) {
      body(first, std::min(tile_, tokens_ - first));
    }
  }

  at::Tensor columns(int64_t tokens) { return memory_.rows(tokens); }

 private:
  static int64_t tokens_of_tile(const at::Tensor& x, int64_t columns, int64_t tile_bytes) {
    const int64_t token_bytes = std::max<int64_t>(columns * x.element_size(), 1);
    const int64_t tile = std::max(tile_bytes / token_bytes, kTileMinTokens);
    return std::clamp<int64_t>(tile, 1, std::max<int64_t>(x.size(0), 1));
  }

  int64_t tokens_, tile_;
  ScratchRows memory_;
};

// The results that are computed from C, tile by tile.
struct Selection {
  at::Tensor bias;  // undefined: none
  at::Tensor norms, experts;
  at::Tensor c_chosen;  // no rows: not computed
  int64_t rank;

  // `squares`: from fused_squares(), or undefined. With squares, `c` may be undefined if c_chosen
  // is not computed.
  void score(int64_t first, int64_t tokens, const at::Tensor& c, const at::Tensor& squares,
             ScalarType type, int64_t row_bytes) {
    const auto tile_of = [&](at::Tensor& tensor) {
      return tensor.narrow(0, first, tokens).mutable_data_ptr();
    };
    launch(norms,
           ScoreTokens{.type = type,
                       .c = c.defined() ? c.const_data_ptr() : nullptr,
                       .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
                       .norms = tile_of(norms),
                       .experts = static_cast<int64_t*>(tile_of(experts)),
                       .c_chosen = c_chosen.size(0) > 0 ? tile_of(c_chosen) : nullptr,
                       .tokens = tokens,
                       .num_experts = norms.size(1),
                       .rank = rank,
                       .k = experts.size(1),
                       .row_bytes = row_bytes,
                       .squares = squares.defined() ? squares.const_data_ptr<float>() : nullptr,
                       .squares_per_norm = rank / kColumnsOfSum});
  }
};

// Computes C = x W in a kernel that also sums the squares of C, and returns these sums. Returns an
// undefined tensor if no kernel supports it. `c` is written if it is defined.
at::Tensor fused_squares(const at::Tensor& x, const at::Tensor& w, const at::Tensor& c) {
  const int64_t columns = w.size(0) * w.size(2);
  if (w.size(2) % kColumnsOfSum != 0) return {};
  const auto squares =
      at::empty({x.size(0), columns / kColumnsOfSum}, x.options().dtype(at::kFloat));
  const SquareRows to{.squares = squares.mutable_data_ptr<float>(),
                      .c = c.defined() ? c.mutable_data_ptr() : nullptr};
  return fused_products(x, w, to) ? squares : at::Tensor();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_topk(
    const at::Tensor& x, const at::Tensor& w, int64_t k, const std::optional<at::Tensor>& bias,
    bool keep_chosen, bool keep_all) {
  check_product(x, w);
  const int64_t num_experts = w.size(0), rank = w.size(2);
  TORCH_CHECK_VALUE(1 <= k && k <= num_experts, "k must lie in 1..", num_experts,
                    " (the number of experts), not ", k);
  Selection to{.bias = {},
               .norms = at::empty({x.size(0), num_experts}, x.options().dtype(sum_type_of(x))),
               .experts = at::empty({x.size(0), k}, x.options().dtype(at::kLong)),
               .c_chosen = x.new_empty({keep_chosen ? x.size(0) : 0, k, rank}),
               .rank = rank};
  if (bias) {
    check_together(x, {*bias});
    check_sizes("bias", *bias, {num_experts});
    to.bias = bias->to(sum_type_of(x)).contiguous();
  }
  auto c = x.new_empty({keep_all ? x.size(0) : 0, num_experts, rank});
  const auto type = scalar_type_of("x", x);
  const int64_t row_bytes = rank * static_cast<int64_t>(x.element_size());

  // If C is either kept completely or not needed again, one kernel can compute the norms of all
  // tokens at once. Otherwise C is needed again for c_chosen, and the tiles below keep it small.
  if (keep_all || !keep_chosen) {
    const auto c_if_kept = keep_all ? c : at::Tensor();
    const auto squares = fused_squares(x, w, c_if_kept);
    if (squares.defined()) {
      to.score(0, x.size(0), c_if_kept, squares, type, row_bytes);
      return {to.norms, to.experts, to.c_chosen, c};
    }
  }
  at::Tensor w_cat;
  Tiles tiles(x, num_experts * rank, kTileBytes);
  tiles.for_each([&](int64_t first, int64_t tokens) {
    const auto x_tile = x.narrow(0, first, tokens);
    auto c_tile = keep_all ? c.narrow(0, first, tokens).flatten(1) : tiles.columns(tokens);
    const auto squares = fused_squares(x_tile, w, c_tile);
    if (!squares.defined()) {
      if (!w_cat.defined()) w_cat = concatenate(w);
      product_out(c_tile, x_tile, w_cat);
    }
    to.score(first, tokens, c_tile, squares, type, row_bytes);
  });
  return {to.norms, to.experts, to.c_chosen, c};
}

// dC[t, e] = dnorms[t, e] / norms[t, e] * C[t, e], where the quotient is 0 if the norm is 0. For
// the chosen experts, the gradient of c_chosen is added. Without `c`, C is recomputed.
std::tuple<at::Tensor, at::Tensor> norm_topk_backward(const at::Tensor& dnorms,
                                                      const std::optional<at::Tensor>& dc_chosen,
                                                      const at::Tensor& x, const at::Tensor& w,
                                                      const at::Tensor& norms,
                                                      const at::Tensor& experts,
                                                      const std::optional<at::Tensor>& c) {
  check_product(x, w);
  const int64_t num_experts = w.size(0), rank = w.size(2);
  check_together(x, {dnorms, norms, experts});
  check_sizes("norms", norms, {x.size(0), num_experts});
  check_sizes("dnorms", dnorms, norms.sizes());
  check_index("experts", experts, 2);
  at::Tensor c_3d, dc_chosen_3d;
  if (c) {
    check_product_of("c", *c, x, num_experts, rank);
    c_3d = c->contiguous();
  }
  if (dc_chosen) {
    check_product_of("dc_chosen", *dc_chosen, x, experts.size(1), rank);
    dc_chosen_3d = dc_chosen->contiguous();
  }

  const auto factors = (dnorms / norms).masked_fill_(norms == 0, 0).to(sum_type_of(x)).contiguous();
  const auto w_cat = concatenate(w);
  const auto experts_2d = experts.contiguous();
  auto dx = at::empty(x.sizes(), x.options());
  // The tiles are added in the type of sums, so that the result is rounded to bf16 only once.
  auto dw_cat = at::empty(w_cat.sizes(), w.options().dtype(sum_type_of(w)));
  if (x.size(0) == 0) dw_cat.zero_();
  Tiles tiles(x, w_cat.size(1), kBackwardTileBytes);
  tiles.for_each([&](int64_t first, int64_t tokens) {
    const auto x_tile = x.narrow(0, first, tokens);
    auto dc = tiles.columns(tokens);
    if (!c) product_out(dc, x_tile, w_cat);
    const auto tile_of = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, first, tokens).const_data_ptr();
    };
    launch(x, NormGradient{.type = scalar_type_of("x", x),
                           .c = c ? tile_of(c_3d) : dc.const_data_ptr(),
                           .factors = tile_of(factors),
                           .experts = static_cast<const int64_t*>(tile_of(experts_2d)),
                           .dc_chosen = dc_chosen ? tile_of(dc_chosen_3d) : nullptr,
                           .dc = dc.mutable_data_ptr(),
                           .tokens = tokens,
                           .num_experts = num_experts,
                           .rank = rank,
                           .k = experts.size(1)});
    auto dx_tile = dx.narrow(0, first, tokens);
    product_out(dx_tile, dc, w_cat.t());
    product_out(dw_cat, x_tile.t(), dc, /*accumulate=*/first > 0);
  });
  const auto dw = dw_cat.view({w.size(1), num_experts, rank}).permute({1, 0, 2});
  return {dx, dw.to(w.scalar_type()).contiguous()};
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("norm_topk",
                      "(Tensor x, Tensor w, int k, Tensor? bias, bool keep_chosen, bool keep_all) "
                      "-> (Tensor norms, Tensor experts, Tensor c_chosen, Tensor c)",
                      moe_parallel::norm_topk)
MOE_PARALLEL_OPERATOR("norm_topk_backward",
                      "(Tensor dnorms, Tensor? dc_chosen, Tensor x, Tensor w, Tensor norms, "
                      "Tensor experts, Tensor? c) -> (Tensor dx, Tensor dw)",
                      moe_parallel::norm_topk_backward)
