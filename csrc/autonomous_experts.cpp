// The autonomous layer after its selection, as one operator: gather, C and P,
// h = silu(C W_up) * P * prob, W_out, gather and sum.
//
// C = x W_down is computed here or given by the selection (`c_TKR`). If it is given, its gradient
// flows back to the selection, unless `norms` of it are given too: then the probs are their
// softmax, and the gradient goes through the norms to x and W_down here. For the backward pass x,
// P, the row map and C are kept, C as `c_TKR` or as `c_NR`. G = C W_up, a small product, is
// recomputed or, on request, kept. Main gradients are as in routed_experts.cpp.
#include <ATen/ops/_softmax_backward_data.h>

#include <optional>
#include <tuple>

#include "expert_rows.h"
#include "norm_topk_gradient.h"
#include "swiglu_tensors.h"

namespace moe_parallel {
namespace {

struct Weights {
  const std::optional<at::Tensor>& down;  // [E, D, R]; none if c_TKR is given without its norms
  const at::Tensor& up;                   // [E, R, W]
  const at::Tensor& p;                    // [E, D, W]
  const at::Tensor& out;                  // [E, W, D]

  int64_t rank() const { return up.size(1); }
  int64_t width() const { return up.size(2); }

  void check(const at::Tensor& x, const std::optional<at::Tensor>& c_TKR,
             const std::optional<at::Tensor>& norms, const at::Tensor& rows,
             const at::Tensor& counts) const {
    check_dim("w_up", up, 3);
    check_weight("w_up", up, x, {counts.size(0), rank(), width()});
    check_weight("w_p", p, x, {counts.size(0), x.size(1), width()});
    check_weight("w_out", out, x, {counts.size(0), width(), x.size(1)});
    TORCH_CHECK_VALUE(down.has_value() == (norms.has_value() || !c_TKR.has_value()),
                      "w_down is needed without c_TKR or with its norms, and only then");
    TORCH_CHECK_VALUE(c_TKR || !norms, "norms are those of c_TKR: both are needed");
    if (norms) {
      check_together(x, {*norms});
      check_sizes("norms", *norms, rows.sizes());
    }
    if (down) check_weight("w_down", *down, x, {counts.size(0), x.size(1), rank()});
    if (c_TKR) check_weight("c_TKR", *c_TKR, x, {rows.size(0), rows.size(1), rank()});
  }

 private:
  static void check_weight(const char* name, const at::Tensor& weight, const at::Tensor& x,
                           at::IntArrayRef sizes) {
    check_sizes(name, weight, sizes);
    check_same_type(name, weight, "x", x);
    check_together(x, {weight});
  }
};

// dL/dp / p by choice, where the probs are the softmax of the norms p: `softmax_of_selected` of
// selection/topk.py. The autonomous layer asserts that rule before it gives norms.
at::Tensor factors_of_probs(const at::Tensor& dprobs, const at::Tensor& probs,
                            const at::Tensor& norms) {
  return norm_factors(at::_softmax_backward_data(dprobs, probs, -1, probs.scalar_type()), norms);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> autonomous_experts(
    const at::Tensor& x, const at::Tensor& probs, const at::Tensor& slots, const at::Tensor& rows,
    const at::Tensor& counts, const std::optional<at::Tensor>& w_down, const at::Tensor& w_up,
    const at::Tensor& w_p, const at::Tensor& w_out, const std::optional<at::Tensor>& c_TKR,
    const std::optional<at::Tensor>& norms, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, bool keep_g) {
  const ExpertRows map(x, probs, slots, rows, counts);
  const Weights w{w_down, w_up, w_p, w_out};
  w.check(x, c_TKR, norms, rows, counts);
  const auto tokens = with_dense_rows(x);
  const auto c_2d = c_TKR ? with_dense_rows(c_TKR->flatten(0, 1)) : at::Tensor();
  const auto probs_of_rows = map.probs_by_row(probs);
  auto p = map.new_rows(x, w.width()), y = map.new_rows(x, x.size(1));
  auto c_NR = c_TKR ? x.new_empty({0, w.rank()}) : map.new_rows(x, w.rank());
  auto g = keep_g ? map.new_rows(x, w.width()) : x.new_empty({0, w.width()});

  const auto& blocks = map.blocks();
  const auto columns = [&](int64_t count) { return map.scratch(x, blocks, count); };
  auto x_memory = columns(x.size(1)), h_memory = columns(w.width());
  auto c_memory = columns(w.rank()), g_memory = columns(w.width());
  for (const auto& block : blocks) {
    const auto groups = block.product_counts;
    auto h = block.part(h_memory), p_rows = block.product(p), y_rows = block.product(y);
    const auto x_rows = map.gather(x_memory, tokens, block);
    auto c_rows = c_TKR ? map.gather_choices(c_memory, c_2d, block) : block.product(c_NR);
    if (!c_TKR) grouped_gemm_out(c_rows, x_rows, block.experts(*w_down), groups);
    grouped_gemm_out(p_rows, x_rows, block.experts(w_p), groups);
    auto g_rows = keep_g ? block.product(g) : block.product(g_memory);
    grouped_gemm_out(g_rows, c_rows, block.experts(w_up), groups);
    swiglu_out(h, g_rows.narrow(0, 0, block.num_rows), block.rows(p), block.rows(probs_of_rows));
    grouped_gemm_out(y_rows, block.product(h_memory), block.experts(w_out), groups);
  }
  return {map.sum(map.only_rows(y)), map.only_rows(p), map.only_rows(c_NR), map.only_rows(g)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
autonomous_experts_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& probs,
                            const at::Tensor& slots, const at::Tensor& rows,
                            const at::Tensor& counts, const std::optional<at::Tensor>& w_down,
                            const at::Tensor& w_up, const at::Tensor& w_p, const at::Tensor& w_out,
                            const std::optional<at::Tensor>& c_TKR,
                            const std::optional<at::Tensor>& norms, const at::Tensor& p,
                            const at::Tensor& c_NR, const at::Tensor& g,
                            const std::optional<at::Tensor>& main_up,
                            const std::optional<at::Tensor>& main_p,
                            const std::optional<at::Tensor>& main_out) {
  const ExpertRows map(x, probs, slots, rows, counts);
  const Weights w{w_down, w_up, w_p, w_out};
  w.check(x, c_TKR, norms, rows, counts);
  check_sizes("dy", dy, x.sizes());
  check_same_type("dy", dy, "x", x);
  check_together(x, {dy, p, c_NR, g});
  check_sizes("p", p, {map.size(), w.width()});
  check_same_type("p", p, "x", x);
  check_same_type("c_NR", c_NR, "x", x);
  const bool has_g = g.numel() > 0;
  if (has_g) check_sizes("g", g, p.sizes());
  if (!c_TKR) check_sizes("c_NR", c_NR, {map.size(), w.rank()});
  const auto tokens = with_dense_rows(x), gradients = dy.contiguous(), p_2d = p.contiguous();
  const auto c_2d = c_TKR ? with_dense_rows(c_TKR->flatten(0, 1)) : at::Tensor();
  const auto own_c = with_dense_rows(c_NR);
  const auto probs_of_rows = map.probs_by_row(probs);
  auto dprobs_of_rows = at::empty_like(probs_of_rows);
  auto dx = map.new_rows(x, x.size(1));
  auto dc_NR = c_TKR ? map.new_rows(x, w.rank()) : x.new_empty({0, w.rank()});
  TransposedRows memory;
  std::optional<WeightGradient> dw_down;
  if (w_down) dw_down.emplace("w_down", *w_down, counts, memory);
  WeightGradient dw_up("main_up", w_up, counts, memory, main_up);
  WeightGradient dw_p("main_p", w_p, counts, memory, main_p);
  WeightGradient dw_out("main_out", w_out, counts, memory, main_out);

  const auto& blocks = map.blocks();
  const auto columns = [&](int64_t count) { return map.scratch(x, blocks, count); };
  auto row_memory = columns(x.size(1));  // the rows of dy, and then those of x
  auto dh_memory = columns(w.width()), own_h_memory = columns(w.width());
  auto dg_memory = columns(w.width()), own_g_memory = columns(w.width());
  auto dp_memory = columns(w.width());
  auto& h_memory = in_place(x) ? dh_memory : own_h_memory;
  auto& g_memory = in_place(x) ? dg_memory : own_g_memory;
  auto c_memory = columns(w.rank()), dc_memory = columns(w.rank());
  for (const auto& block : blocks) {
    const auto& groups = block.product_counts;
    const auto transposed = [&](const at::Tensor& weight) {
      return block.experts(weight).transpose(1, 2);
    };
    at::Tensor c_rows;
    if (c_TKR) {
      c_rows = map.gather_choices(c_memory, c_2d, block);
    } else if (block.product_rows > block.num_rows) {
      block.part(c_memory).copy_(block.rows(own_c));
      c_rows = block.product(c_memory);
    } else {
      c_rows = block.rows(own_c);
    }
    auto h = block.part(h_memory), dg = block.part(dg_memory), dp = block.part(dp_memory);
    const auto dy_rows = map.gather(row_memory, gradients, block);
    const SwigluGradients to{.dgate = dg, .dup = dp, .dprobs = block.rows(dprobs_of_rows), .h = h};
    auto dh_rows = dh_memory.rows(block.product_rows);
    grouped_gemm_out(dh_rows, dy_rows, transposed(w_out), groups);
    auto g_rows = has_g ? block.rows(g) : block.product(g_memory);
    if (!has_g) grouped_gemm_out(g_rows, c_rows, block.experts(w_up), groups);
    swiglu_backward_out(to, dh_rows.narrow(0, 0, block.num_rows),
                        g_rows.narrow(0, 0, block.num_rows), block.rows(p_2d),
                        block.rows(probs_of_rows));
    dw_out.take(block, block.product(h_memory), dy_rows);

    auto dc_rows = c_TKR ? block.product(dc_NR) : block.product(dc_memory),
         dx_rows = block.product(dx);
    dg = block.product(dg_memory);
    dp = block.product(dp_memory);
    dw_up.take(block, c_rows, dg);
    grouped_gemm_out(dc_rows, dg, transposed(w_up), groups);
    const auto x_rows = map.gather(row_memory, tokens, block);
    dw_p.take(block, x_rows, dp);
    grouped_gemm_out(dx_rows, dp, transposed(w_p), groups);
    if (c_TKR) continue;
    dw_down->take(block, x_rows, dc_rows);
    grouped_gemm_out(dx_rows, dc_rows, transposed(*w_down), groups, /*accumulate=*/true);
  }
  const auto dprobs = map.values_by_choice(dprobs_of_rows);
  if (norms) {
    const auto factors_N = map.values_by_row(factors_of_probs(dprobs, probs, *norms));
    // If there is one block, its rows of x are still there.
    const auto x_of = [&](const RowBlock& block) {
      return blocks.size() > 1 ? map.gather(row_memory, tokens, block) : block.product(row_memory);
    };
    const auto c_of = [&](const RowBlock& block) { map.gather_choices(c_memory, c_2d, block); };
    const auto dc_of = [&](const RowBlock& block) { return block.rows(dc_NR); };
    ChosenNormGradient{*w_down, *dw_down, dx, /*adds_to_dx=*/true, /*rounds_before_adding=*/false}
        .take(blocks, factors_N, c_memory, x_of, c_of, dc_of);
  }
  const bool returns_dc = c_TKR && !norms;
  const auto dc_TKR = returns_dc ? map.by_choice(map.only_rows(dc_NR)) : x.new_empty({0, w.rank()});
  return {map.sum_like(tokens, map.only_rows(dx)),
          dprobs,
          dw_down ? dw_down->own() : x.new_empty({0}),
          dw_up.own(),
          dw_p.own(),
          dw_out.own(),
          dc_TKR};
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR(
    "autonomous_experts",
    "(Tensor x, Tensor probs, Tensor slots, Tensor rows, Tensor counts, Tensor? w_down, "
    "Tensor w_up, Tensor w_p, Tensor w_out, Tensor? c_TKR, Tensor? norms, Tensor? main_up, "
    "Tensor? main_p, Tensor? main_out, bool keep_g) "
    "-> (Tensor y, Tensor p, Tensor c_NR, Tensor g)",
    moe_parallel::autonomous_experts)
MOE_PARALLEL_OPERATOR(
    "autonomous_experts_backward",
    "(Tensor dy, Tensor x, Tensor probs, Tensor slots, Tensor rows, Tensor counts, "
    "Tensor? w_down, Tensor w_up, Tensor w_p, Tensor w_out, Tensor? c_TKR, Tensor? norms, "
    "Tensor p, Tensor c_NR, Tensor g, Tensor(a!)? main_up, Tensor(b!)? main_p, "
    "Tensor(c!)? main_out) -> (Tensor dx, Tensor dprobs, Tensor dw_down, Tensor dw_up, "
    "Tensor dw_p, Tensor dw_out, Tensor dc_TKR)",
    moe_parallel::autonomous_experts_backward)
