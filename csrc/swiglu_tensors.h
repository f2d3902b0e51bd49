// SwiGLU of tensors, for the operator and the fused layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "launch.h"
#include "swiglu.h"

namespace moe_parallel {

inline const void* data_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// h = silu(gate) * up * probs. gate and up must have dense rows.
inline void swiglu_out(at::Tensor& h, const at::Tensor& gate, const at::Tensor& up,
                       const std::optional<at::Tensor>& probs) {
  std::optional<at::Tensor> dense;
  if (probs) dense = probs->contiguous();
  launch(gate, Swiglu{.type = scalar_type_of("gate", gate),
                      .gate = gate.const_data_ptr(),
                      .up = up.const_data_ptr(),
                      .probs = data_of(dense),
                      .h = h.mutable_data_ptr(),
                      .rows = gate.size(0),
                      .width = gate.size(1),
                      .gate_stride = gate.stride(0),
                      .up_stride = up.stride(0)});
}

// Whether the kernel of the gradients may write h over dh, and dgate over gate: less memory, and
// lines that are in the caches. On CUDA this was not tried.
inline bool in_place(const at::Tensor& x) { return x.is_cpu(); }

// The tensors for the gradients. An undefined tensor is not computed.
struct SwigluGradients {
  at::Tensor dgate;
  at::Tensor dup;
  at::Tensor dprobs;
  at::Tensor h;
};

inline void swiglu_backward_out(const SwigluGradients& to, const at::Tensor& dh,
                                const at::Tensor& gate, const at::Tensor& up,
                                const std::optional<at::Tensor>& probs) {
  std::optional<at::Tensor> dense;
  if (probs) dense = probs->contiguous();
  const bool wants_probs = to.dprobs.defined();
  launch(gate, SwigluBackward{.type = scalar_type_of("gate", gate),
                              .dh = dh.const_data_ptr(),
                              .gate = gate.const_data_ptr(),
                              .up = up.const_data_ptr(),
                              .probs = data_of(dense),
                              .dgate = to.dgate.mutable_data_ptr(),
                              .dup = to.dup.mutable_data_ptr(),
                              .dprobs = wants_probs ? to.dprobs.mutable_data_ptr() : nullptr,
                              .h = to.h.defined() ? to.h.mutable_data_ptr() : nullptr,
                              .rows = gate.size(0),
                              .width = gate.size(1),
                              .gate_stride = gate.stride(0),
                              .up_stride = up.stride(0),
                              .dgate_stride = to.dgate.stride(0),
                              .dup_stride = to.dup.stride(0)});
}

}  // namespace moe_parallel
