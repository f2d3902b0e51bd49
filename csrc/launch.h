// The steps that every operator runs around its kernels: it checks its tensors, determines their
// type and selects the device.
//
// A kernel's task is a plain struct of raw pointers and sizes (permute.h, ...). Each task has a
// run_on_cpu() and, in a build with CUDA, a run_on_cuda().
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace moe_parallel {

inline ScalarType scalar_type_of(const char* name, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return ScalarType::kFloat32;
    case at::kDouble:
      return ScalarType::kFloat64;
    case at::kBFloat16:
      return ScalarType::kBFloat16;
    case at::kHalf:
      return ScalarType::kFloat16;
    default:
      TORCH_CHECK_TYPE(false, name, " must be float32, float64, bfloat16 or float16, not ",
                       tensor.scalar_type());
  }
}

inline at::ScalarType sum_type_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_dim(const char* name, const at::Tensor& tensor, int64_t dim) {
  TORCH_CHECK_VALUE(tensor.dim() == dim, name, " must have ", dim, " dimensions, not shape ",
                    tensor.sizes());
}

inline void check_index(const char* name, const at::Tensor& tensor, int64_t dim) {
  check_dim(name, tensor, dim);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong, name, " must be int64, not ",
                   tensor.scalar_type());
}

inline void check_same_type(const char* name, const at::Tensor& tensor, const char* other_name,
                            const at::Tensor& other) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), name, " is ", tensor.scalar_type(),
                   ", ", other_name, " is ", other.scalar_type());
}

inline void check_sizes(const char* name, const at::Tensor& tensor, at::IntArrayRef wanted) {
  TORCH_CHECK_VALUE(tensor.sizes() == wanted, name, " must have shape ", wanted, ", not ",
                    tensor.sizes());
}

inline int64_t bytes_of_element(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.element_size());
}

// Returns the tensor with dense rows: there may be gaps between rows, but not between the elements
// of a row.
inline at::Tensor with_dense_rows(const at::Tensor& tensor) {
  const bool dense = tensor.size(1) <= 1 || tensor.stride(1) == 1;
  return dense ? tensor : tensor.contiguous();
}

// Kernels use raw pointers, so all tensors must be on one device.
inline void check_together(const at::Tensor& first, at::TensorList others) {
  for (const auto& other : others) {
    TORCH_CHECK_VALUE(other.device() == first.device(), "tensors must be on one device, not on ",
                      first.device(), " and ", other.device());
  }
}

// Runs the task on the device of the tensor. On CUDA it runs on the current stream.
template <class Task>
void launch(const at::Tensor& where, const Task& task) {
#ifdef MOE_PARALLEL_CUDA
  if (where.is_cuda()) {
    const c10::cuda::CUDAGuard guard(where.device());
    run_on_cuda(task, at::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
#endif
  TORCH_INTERNAL_ASSERT(where.is_cpu());
  run_on_cpu(task);
}

}  // namespace moe_parallel

// Declares the operator `name schema`, for the CPU alone or for every device for which this build
// has kernels. One function implements it. The macro belongs at the end of the file that has the
// function.
#define MOE_PARALLEL_CPU_OPERATOR(name, schema, function)         \
  TORCH_LIBRARY_FRAGMENT(moe_parallel, m) { m.def(name schema); } \
  TORCH_LIBRARY_IMPL(moe_parallel, CPU, m) { m.impl(name, TORCH_FN(function)); }
#ifdef MOE_PARALLEL_CUDA
#define MOE_PARALLEL_OPERATOR(name, schema, function) \
  MOE_PARALLEL_CPU_OPERATOR(name, schema, function)   \
  TORCH_LIBRARY_IMPL(moe_parallel, CUDA, m) { m.impl(name, TORCH_FN(function)); }
#else
#define MOE_PARALLEL_OPERATOR MOE_PARALLEL_CPU_OPERATOR
#endif
