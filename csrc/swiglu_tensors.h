// SwiGLU of tensors, for the operator and the fused layers.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <optional>

#include "fused_gemm.h"
#include "grouped_gemm.h"
#include "launch.h"
#include "scratch_rows.h"
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

// The same as an epilogue, which stores gate and up. The probs have the type of sums, which is
// float for the types that can be fused.
inline ActivateRows activate_rows(at::Tensor& h, const at::Tensor& gate, const at::Tensor& up,
                                  const at::Tensor& probs) {
  return {.probs = static_cast<const float*>(probs.const_data_ptr()),
          .h = h.mutable_data_ptr(),
          .gate = gate.mutable_data_ptr(),
          .up = up.mutable_data_ptr(),
          .stride = up.stride(0)};
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

// Computes the gradients for dh = dy w in one kernel. Returns false, and does nothing, if no kernel
// supports that.
inline bool fused_swiglu_backward(const SwigluGradients& to, const at::Tensor& dy,
                                  const at::Tensor& w, const at::Tensor& counts,
                                  const at::Tensor& gate, const at::Tensor& up,
                                  const at::Tensor& probs) {
  const int64_t chunks = (gate.size(1) + kColumnsOfSum - 1) / kColumnsOfSum;
  const auto sums = at::empty({gate.size(0), chunks}, dy.options().dtype(at::kFloat));
  const DifferentiateRows epilogue{.probs = static_cast<const float*>(probs.const_data_ptr()),
                                   .gate = gate.const_data_ptr(),
                                   .up = up.const_data_ptr(),
                                   .dgate = to.dgate.mutable_data_ptr(),
                                   .dup = to.dup.mutable_data_ptr(),
                                   .h = to.h.mutable_data_ptr(),
                                   .dprobs = sums.mutable_data_ptr<float>(),
                                   .stride = gate.stride(0),
                                   .dstride = to.dgate.stride(0)};
  TORCH_INTERNAL_ASSERT(up.stride(0) == epilogue.stride && to.dup.stride(0) == epilogue.dstride);
  if (!fused_gemm({{rows_of(dy), w, w}}, counts, gate.size(0), epilogue)) return false;
  auto dprobs = to.dprobs;
  at::sum_out(dprobs, sums, 1);
  return true;
}

// h = silu(c w) * up * probs in one kernel, without the gate c w in memory. Returns false, and does
// nothing, if no kernel supports that.
inline bool fused_swiglu_of_gate(at::Tensor& h, const GatheredRows& c, const at::Tensor& w,
                                 const at::Tensor& counts, const at::Tensor& up,
                                 const at::Tensor& probs) {
  if (!up.is_contiguous()) return false;
  const ActivateGateRows epilogue{.probs = static_cast<const float*>(probs.const_data_ptr()),
                                  .up = up.const_data_ptr(),
                                  .h = h.mutable_data_ptr()};
  return fused_gemm({{c, w, {}}}, counts, h.size(0), epilogue);
}

// The gradients for the gate c w, in the same way.
inline bool fused_swiglu_backward_of_gate(const SwigluGradients& to, const at::Tensor& dh,
                                          const GatheredRows& c, const at::Tensor& w,
                                          const at::Tensor& counts, const at::Tensor& up,
                                          const at::Tensor& probs) {
  if (!up.is_contiguous() || !to.dgate.is_contiguous() || !to.dup.is_contiguous()) return false;
  const int64_t chunks = (up.size(1) + kColumnsOfSum - 1) / kColumnsOfSum;
  const auto sums = at::empty({up.size(0), chunks}, dh.options().dtype(at::kFloat));
  const DifferentiateGateRows epilogue{.probs = static_cast<const float*>(probs.const_data_ptr()),
                                       .dh = dh.const_data_ptr(),
                                       .up = up.const_data_ptr(),
                                       .dgate = to.dgate.mutable_data_ptr(),
                                       .dup = to.dup.mutable_data_ptr(),
                                       .h = to.h.mutable_data_ptr(),
                                       .dprobs = sums.mutable_data_ptr<float>()};
  if (!fused_gemm({{c, w, {}}}, counts, up.size(0), epilogue)) return false;
  auto dprobs = to.dprobs;
  at::sum_out(dprobs, sums, 1);
  return true;
}

// Computes the gradients for dh = dy w, where dy may have rows after those of gate. The memory `dh`
// is used if no single kernel computes them.
inline void swiglu_backward_of_product(const SwigluGradients& to, const at::Tensor& dy,
                                       const at::Tensor& w, const at::Tensor& counts,
                                       const at::Tensor& gate, const at::Tensor& up,
                                       const at::Tensor& probs, ScratchRows& dh) {
  if (fused_swiglu_backward(to, dy, w, counts, gate, up, probs)) return;
  auto dh_rows = dh.rows(dy.size(0));
  grouped_gemm_out(dh_rows, dy, w, counts);
  swiglu_backward_out(to, dh_rows.narrow(0, 0, gate.size(0)), gate, up, probs);
}

}  // namespace moe_parallel
