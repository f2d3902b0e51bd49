// SwiGLU of tensors, as the operator and the fused layers run it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "launch.h"
#include "swiglu.h"

namespace moe_parallel {

// Rows may lie apart, the elements of one may not.
inline at::Tensor with_dense_rows(const at::Tensor& tensor) {
  const bool dense = tensor.size(1) <= 1 || tensor.stride(1) == 1;
  return dense ? tensor : tensor.contiguous();
}

inline const void* data_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// h = silu(gate) * up * probability; gate and up with dense rows.
inline void swiglu_out(at::Tensor& h, const at::Tensor& gate, const at::Tensor& up,
                       const std::optional<at::Tensor>& probabilities) {
  std::optional<at::Tensor> dense;
  if (probabilities) dense = probabilities->contiguous();
  launch(gate, Swiglu{.type = scalar_type_of("gate", gate),
                      .gate = gate.const_data_ptr(),
                      .up = up.const_data_ptr(),
                      .probabilities = data_of(dense),
                      .h = h.mutable_data_ptr(),
                      .rows = gate.size(0),
                      .width = gate.size(1),
                      .gate_stride = gate.stride(0),
                      .up_stride = up.stride(0)});
}

// Where the gradients go; an undefined tensor is not wanted.
struct SwigluGradients {
  at::Tensor dgate;
  at::Tensor dup;
  at::Tensor dprobabilities;
  at::Tensor h;
};

inline void swiglu_backward_out(const SwigluGradients& to, const at::Tensor& dh,
                                const at::Tensor& gate, const at::Tensor& up,
                                const std::optional<at::Tensor>& probabilities) {
  std::optional<at::Tensor> dense;
  if (probabilities) dense = probabilities->contiguous();
  const bool wants_probabilities = to.dprobabilities.defined();
  launch(gate,
         SwigluBackward{
             .type = scalar_type_of("gate", gate),
             .dh = dh.const_data_ptr(),
             .gate = gate.const_data_ptr(),
             .up = up.const_data_ptr(),
             .probabilities = data_of(dense),
             .dgate = to.dgate.mutable_data_ptr(),
             .dup = to.dup.mutable_data_ptr(),
             .dprobabilities = wants_probabilities ? to.dprobabilities.mutable_data_ptr() : nullptr,
             .h = to.h.defined() ? to.h.mutable_data_ptr() : nullptr,
             .rows = gate.size(0),
             .width = gate.size(1),
             .gate_stride = gate.stride(0),
             .up_stride = up.stride(0),
             .dgate_stride = to.dgate.stride(0),
             .dup_stride = to.dup.stride(0)});
}

}  // namespace moe_parallel
