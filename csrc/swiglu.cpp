#include "swiglu.h"

#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>
#include <utility>

#include "swiglu_tensors.h"

namespace moe_parallel {
namespace {

void check_inputs(const at::Tensor& gate, const at::Tensor& up,
                  const std::optional<at::Tensor>& probs) {
  check_dim("gate", gate, 2);
  check_sizes("up", up, gate.sizes());
  check_same_type("up", up, "gate", gate);
  check_together(gate, {up});
  if (!probs) return;
  check_together(gate, {*probs});
  check_sizes("probs", *probs, {gate.size(0)});
  TORCH_CHECK_TYPE(probs->scalar_type() == sum_type_of(gate), "probs must be ", sum_type_of(gate),
                   " for rows of ", gate.scalar_type(), ", not ", probs->scalar_type());
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up,
                  const std::optional<at::Tensor>& probs) {
  check_inputs(gate, up, probs);
  auto h = at::empty(gate.sizes(), gate.options());
  swiglu_out(h, with_dense_rows(gate), with_dense_rows(up), probs);
  return h;
}

void check_dh(const at::Tensor& dh, const at::Tensor& gate) {
  check_sizes("dh", dh, gate.sizes());
  check_same_type("dh", dh, "gate", gate);
  check_together(gate, {dh});
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_backward(
    const at::Tensor& dh, const at::Tensor& gate, const at::Tensor& up,
    const std::optional<at::Tensor>& probs) {
  check_inputs(gate, up, probs);
  check_dh(dh, gate);
  auto dgate = at::empty(gate.sizes(), gate.options());
  auto dup = at::empty(gate.sizes(), gate.options());
  auto dprobs = at::empty({gate.size(0)}, gate.options().dtype(sum_type_of(gate)));
  swiglu_backward_out({.dgate = dgate, .dup = dup, .dprobs = dprobs, .h = {}}, dh.contiguous(),
                      with_dense_rows(gate), with_dense_rows(up), probs);
  return {dgate, dup, dprobs};
}

// Two views: the left and the right columns.
std::pair<at::Tensor, at::Tensor> halves_of(const at::Tensor& gate_up) {
  check_dim("gate_up", gate_up, 2);
  TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gate_up must have two equal halves, not ",
                    gate_up.size(1), " columns");
  const int64_t width = gate_up.size(1) / 2;
  return {gate_up.narrow(1, 0, width), gate_up.narrow(1, width, width)};
}

at::Tensor swiglu_halves(const at::Tensor& gate_up) {
  const auto [gate, up] = halves_of(gate_up);
  return swiglu(gate, up, {});
}

at::Tensor swiglu_halves_backward(const at::Tensor& dh, const at::Tensor& gate_up) {
  const auto [gate, up] = halves_of(gate_up);
  check_dh(dh, gate);
  auto dgate_up = at::empty(gate_up.sizes(), gate_up.options());
  const auto [dgate, dup] = halves_of(dgate_up);
  swiglu_backward_out({.dgate = dgate, .dup = dup, .dprobs = {}, .h = {}}, dh.contiguous(),
                      with_dense_rows(gate), with_dense_rows(up), {});
  return dgate_up;
}

}  // namespace
}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("swiglu", "(Tensor gate, Tensor up, Tensor? probs) -> Tensor",
                      moe_parallel::swiglu)
MOE_PARALLEL_OPERATOR("swiglu_backward",
                      "(Tensor dh, Tensor gate, Tensor up, Tensor? probs) "
                      "-> (Tensor dgate, Tensor dup, Tensor dprobs)",
                      moe_parallel::swiglu_backward)
MOE_PARALLEL_OPERATOR("swiglu_halves", "(Tensor gate_up) -> Tensor", moe_parallel::swiglu_halves)
MOE_PARALLEL_OPERATOR("swiglu_halves_backward", "(Tensor dh, Tensor gate_up) -> Tensor",
                      moe_parallel::swiglu_halves_backward)
