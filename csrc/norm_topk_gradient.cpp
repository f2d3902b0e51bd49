// The gradients of AoE's selection: through all norms, or through the chosen norms.
#include "norm_topk_gradient.h"

#include <ATen/ops/empty.h>

#include "grouped_gemm_wide.h"
#include "norm_topk_tiles.h"

namespace moe_parallel {
namespace {

// Of dC: more than in the forward pass, because each tile also reads and writes dW.
constexpr int64_t kCpuGradientTileBytes = int64_t{32} << 20;

// Checks the C of some experts of each token, or its gradient.
void check_product_of(const char* name, const at::Tensor& c, const at::Tensor& x, int64_t experts,
                      int64_t rank) {
  check_together(x, {c});
  check_sizes(name, c, {x.size(0), experts, rank});
  check_same_type(name, c, "x", x);
}

void check_scores(const at::Tensor& dnorms, const at::Tensor& x, const at::Tensor& w,
                  const at::Tensor& norms, const at::Tensor& experts) {
  check_product(x, w);
  check_together(x, {dnorms, norms, experts});
  check_sizes("norms", norms, {x.size(0), w.size(0)});
  check_sizes("dnorms", dnorms, norms.sizes());
  check_index("experts", experts, 2);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> norm_topk_backward(const at::Tensor& dnorms,
                                                      const std::optional<at::Tensor>& dc_TKR,
                                                      const at::Tensor& x, const at::Tensor& w,
                                                      const at::Tensor& norms,
                                                      const at::Tensor& experts,
                                                      const std::optional<at::Tensor>& c_TER) {
  check_scores(dnorms, x, w, norms, experts);
  const int64_t num_experts = w.size(0), rank = w.size(2);
  at::Tensor c_3d, dc_TKR_3d;
  if (c_TER) {
    check_product_of("c_TER", *c_TER, x, num_experts, rank);
    c_3d = c_TER->contiguous();
  }
  if (dc_TKR) {
    check_product_of("dc_TKR", *dc_TKR, x, experts.size(1), rank);
    dc_TKR_3d = dc_TKR->contiguous();
  }

  const auto factors = norm_factors(dnorms, norms).to(sum_type_of(x)).contiguous();
  const auto w_cat = concatenate(w);
  const auto experts_2d = experts.contiguous();
  auto dx = at::empty(x.sizes(), x.options());
  // The tiles are added in the type of sums, so that the result is rounded to bf16 only once.
  auto dw_cat = at::empty(w_cat.sizes(), w.options().dtype(sum_type_of(w)));
  if (x.size(0) == 0) dw_cat.zero_();
  Tiles tiles(x, w_cat.size(1), kCpuGradientTileBytes);
  tiles.for_each([&](int64_t first, int64_t tokens) {
    const auto x_tile = x.narrow(0, first, tokens);
    auto dc = tiles.columns(tokens);
    if (!c_TER) product_out(dc, x_tile, w_cat);
    const auto tile_of = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, first, tokens).const_data_ptr();
    };
    launch(x, NormGradient{.type = scalar_type_of("x", x),
                           .c_TER = c_TER ? tile_of(c_3d) : dc.const_data_ptr(),
                           .factors = tile_of(factors),
                           .experts = static_cast<const int64_t*>(tile_of(experts_2d)),
                           .dc_TKR = dc_TKR ? tile_of(dc_TKR_3d) : nullptr,
                           .dc_TER = dc.mutable_data_ptr(),
                           .tokens = tokens,
                           .num_experts = num_experts,
                           .rank = rank,
                           .k = experts.size(1)});
    auto dx_tile = dx.narrow(0, first, tokens);
    product_out(dx_tile, dc, w_cat.t());
    product_out(dw_cat, x_tile.t(), dc, /*accumulate=*/first > 0);
  });
  const auto dw = dw_cat.view({w.size(1), num_experts, rank}).permute({1, 0, 2});
  const auto dense = w.options().memory_format(at::MemoryFormat::Contiguous);
  return {dx, dw.to(dense).contiguous()};  // the latter copies what has this type already
}

std::tuple<at::Tensor, at::Tensor> norm_topk_chosen_backward(
    const at::Tensor& dnorms, const std::optional<at::Tensor>& dc_TKR, const at::Tensor& x,
    const at::Tensor& w, const at::Tensor& norms, const at::Tensor& experts,
    const std::optional<at::Tensor>& c_TKR, const at::Tensor& slots, const at::Tensor& rows,
    const at::Tensor& counts) {
  check_scores(dnorms, x, w, norms, experts);
  check_sizes("counts", counts, {w.size(0)});
  if (c_TKR) check_product_of("c_TKR", *c_TKR, x, experts.size(1), w.size(2));
  if (dc_TKR) check_product_of("dc_TKR", *dc_TKR, x, experts.size(1), w.size(2));
  const auto chosen = experts.clamp_min(0);  // empty slots have no row
  const auto factors = norm_factors(dnorms.gather(1, chosen), norms.gather(1, chosen));
  const auto factors_TK = factors.to(sum_type_of(x));
  const ExpertRows map(x, factors_TK, slots, rows, counts);
  const RowBlock all{0, w.size(0), 0, map.size(), map.size(), true, counts};
  const auto memory_of = [&](int64_t columns) { return ScratchRows(x, map.size(), columns); };
  auto x_memory = memory_of(x.size(1)), c_memory = memory_of(w.size(2));
  auto dc_memory = memory_of(w.size(2));
  const auto x_of = [&](const RowBlock& block) {
    return map.gather(x_memory, x.contiguous(), block);
  };
  const auto c_of = [&](const RowBlock& block) {
    if (c_TKR) {
      map.gather_choices(c_memory, with_dense_rows(c_TKR->flatten(0, 1)), block);
    } else {
      auto c_rows = block.part(c_memory);
      grouped_gemm_out(c_rows, block.product(x_memory), w, counts);
    }
  };
  const auto dc_of = [&](const RowBlock& block) {
    return dc_TKR ? map.gather_choices(dc_memory, with_dense_rows(dc_TKR->flatten(0, 1)), block)
                  : at::Tensor();
  };
  TransposedRows memory;
  WeightGradient dw("w", w, counts, memory);
  auto dx = x.new_empty({map.size(), x.size(1)});
  // A kernel that added dc_TKR at once would leave a rounding out, and runs of earlier versions
  // would not continue bit for bit.
  ChosenNormGradient{w, dw, dx, /*adds_to_dx=*/false, /*rounds_before_adding=*/true}.take(
      {all}, map.values_by_row(factors_TK), c_memory, x_of, c_of, dc_of);
  return {map.sum(dx), dw.own()};
}

}  // namespace moe_parallel
