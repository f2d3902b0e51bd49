// The routed layer as one operator: gather, W_gate_up, SwiGLU with the probs, W_out, gather, sum.
//
// The backward pass keeps x, the input of SwiGLU and the row map. The rows of h are recomputed, the
// rows of x are gathered again, and the outputs of the experts are not needed. If a main gradient
// is given, the backward pass adds the weight's gradient to it instead of returning it. The forward
// pass takes main gradients only because autograd saves what it is given for the backward pass.
// Where the weights are frozen, their gradients keep what lies in their memory.
#include <optional>
#include <tuple>

#include "expert_rows.h"
#include "swiglu_tensors.h"

namespace moe_parallel {
namespace {

void check_weights(const at::Tensor& x, const at::Tensor& w_gate_up, const at::Tensor& w_out,
                   const at::Tensor& counts) {
  check_dim("w_gate_up", w_gate_up, 3);
  check_dim("w_out", w_out, 3);
  check_together(x, {w_gate_up, w_out});
  check_same_type("w_gate_up", w_gate_up, "x", x);
  check_same_type("w_out", w_out, "x", x);
  const int64_t experts = counts.size(0), width = w_out.size(1);
  check_sizes("w_gate_up", w_gate_up, {experts, x.size(1), 2 * width});
  check_sizes("w_out", w_out, {experts, width, x.size(1)});
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> routed_experts(
    const at::Tensor& x, const at::Tensor& probs, const at::Tensor& slots, const at::Tensor& rows,
    const at::Tensor& counts, const at::Tensor& w_gate_up, const at::Tensor& w_out,
    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&) {
  const ExpertRows map(x, probs, slots, rows, counts);
  check_weights(x, w_gate_up, w_out, counts);
  const auto tokens = with_dense_rows(x);
  const auto probs_of_rows = map.probs_by_row(probs);
  const int64_t width = w_out.size(1);
  auto gate_up = map.new_rows(x, 2 * width), y = map.new_rows(x, x.size(1));

  const auto& blocks = map.blocks();
  const auto columns = [&](int64_t count) { return map.scratch(x, blocks, count); };
  auto x_memory = columns(x.size(1)), h_memory = columns(width);
  for (const auto& block : blocks) {
    const auto groups = block.product_counts;
    auto h = block.part(h_memory), y_rows = block.product(y), products = block.product(gate_up);
    grouped_gemm_out(products, map.gather(x_memory, tokens, block), block.experts(w_gate_up),
                     groups);
    const auto gate_up_rows = block.rows(gate_up);
    swiglu_out(h, gate_up_rows.narrow(1, 0, width), gate_up_rows.narrow(1, width, width),
               block.rows(probs_of_rows));
    grouped_gemm_out(y_rows, block.product(h_memory), block.experts(w_out), groups);
  }
  return {map.sum(map.only_rows(y)), map.only_rows(gate_up)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> routed_experts_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& probs, const at::Tensor& slots,
    const at::Tensor& rows, const at::Tensor& counts, const at::Tensor& w_gate_up,
    const at::Tensor& w_out, const at::Tensor& gate_up,
    const std::optional<at::Tensor>& main_gate_up, const std::optional<at::Tensor>& main_out,
    bool frozen) {
  const ExpertRows map(x, probs, slots, rows, counts);
  check_weights(x, w_gate_up, w_out, counts);
  check_sizes("dy", dy, x.sizes());
  check_same_type("dy", dy, "x", x);
  const int64_t width = w_out.size(1);
  check_sizes("gate_up", gate_up, {map.size(), 2 * width});
  check_same_type("gate_up", gate_up, "x", x);
  check_together(x, {dy, gate_up});
  const auto tokens = with_dense_rows(x), gradients = dy.contiguous(), saved = gate_up.contiguous();
  const auto probs_of_rows = map.probs_by_row(probs);
  auto dprobs_of_rows = at::empty_like(probs_of_rows);
  auto dx = map.new_rows(x, x.size(1));
  TransposedRows memory;
  WeightGradient dw_gate_up("main_gate_up", w_gate_up, counts, memory, main_gate_up);
  WeightGradient dw_out("main_out", w_out, counts, memory, main_out);

  const auto& blocks = map.blocks();
  const auto columns = [&](int64_t count) { return map.scratch(x, blocks, count); };
  auto row_memory = columns(x.size(1));  // the rows of dy, and then those of x
  auto dh_memory = columns(width), own_h_memory = columns(width), d_memory = columns(2 * width);
  auto& h_memory = in_place(x) ? dh_memory : own_h_memory;
  for (const auto& block : blocks) {
    const auto& groups = block.product_counts;
    const auto gate_up_rows = block.rows(saved);
    const auto gate = gate_up_rows.narrow(1, 0, width), up = gate_up_rows.narrow(1, width, width);
    auto h = block.part(h_memory), d_gate_up = block.part(d_memory), dx_rows = block.product(dx);

    const auto dy_rows = map.gather(row_memory, gradients, block);
    const SwigluGradients to{.dgate = d_gate_up.narrow(1, 0, width),
                             .dup = d_gate_up.narrow(1, width, width),
                             .dprobs = block.rows(dprobs_of_rows),
                             .h = h};
    auto dh_rows = dh_memory.rows(block.product_rows);
    grouped_gemm_out(dh_rows, dy_rows, block.experts(w_out).transpose(1, 2), groups);
    swiglu_backward_out(to, dh_rows.narrow(0, 0, block.num_rows), gate, up,
                        block.rows(probs_of_rows));
    if (!frozen) dw_out.take(block, block.product(h_memory), dy_rows);
    d_gate_up = block.product(d_memory);
    if (!frozen) dw_gate_up.take(block, map.gather(row_memory, tokens, block), d_gate_up);
    grouped_gemm_out(dx_rows, d_gate_up, block.experts(w_gate_up).transpose(1, 2), groups);
  }
  return {map.sum_like(tokens, map.only_rows(dx)), map.values_by_choice(dprobs_of_rows),
          dw_gate_up.own(), dw_out.own()};
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("routed_experts",
                      "(Tensor x, Tensor probs, Tensor slots, Tensor rows, Tensor counts, "
                      "Tensor w_gate_up, Tensor w_out, Tensor? main_gate_up, Tensor? main_out) "
                      "-> (Tensor y, Tensor gate_up)",
                      moe_parallel::routed_experts)
MOE_PARALLEL_OPERATOR(
    "routed_experts_backward",
    "(Tensor dy, Tensor x, Tensor probs, Tensor slots, Tensor rows, Tensor counts, "
    "Tensor w_gate_up, Tensor w_out, Tensor gate_up, Tensor(a!)? main_gate_up, "
    "Tensor(b!)? main_out, bool frozen) "
    "-> (Tensor dx, Tensor dprobs, Tensor dw_gate_up, Tensor dw_out)",
    moe_parallel::routed_experts_backward)
