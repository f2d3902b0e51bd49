// Grouped products of CUDA tensors. If the operands are aligned to 16 bytes, CUTLASS computes them
// on tensor cores. Otherwise a plain kernel does. Neither waits for the counts.
#include "grouped_gemm.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include "../alignment.h"
#include "../grouped_gemm_product.h"
#include "../launch.h"
#include "build_config.h"  // written by setup.py

#if MOE_PARALLEL_BUILT_WITH_CUTLASS
#include "cutlass/products.h"
#else
#include <ATen/ops/_grouped_mm.h>
#endif

namespace moe_parallel {
namespace {

bool may_use_tf32() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

bool is_dense(const at::Tensor& t, int64_t dim) { return t.size(dim) <= 1 || t.stride(dim) == 1; }

// A tensor with dense rows or columns, and the description of its matrices for a kernel.
struct Operand {
  at::Tensor tensor;
  GroupedMatrix matrix;
};

// The rows of all groups, [rows, columns], or their transpose.
Operand rows_of_groups(const at::Tensor& t, bool transposed) {
  const auto rows = is_dense(t, 1) && t.stride(0) >= t.size(1) ? t : t.contiguous();
  return {rows,
          {.data = rows.const_data_ptr(),
           .stride = rows.size(0) <= 1 ? rows.size(1) : rows.stride(0),
           .group_stride = 0,
           .by_columns = transposed,
           .is_cut = true}};
}

// One matrix per group, [groups, rows, columns], or a transposed view of that.
Operand matrices(const at::Tensor& t) {
  const bool by_rows = is_dense(t, 2) && t.stride(1) >= t.size(2);
  const bool by_columns = !by_rows && is_dense(t, 1) && t.stride(2) >= t.size(1);
  const auto dense = by_rows || by_columns ? t : t.contiguous();
  const int64_t across = by_columns ? 2 : 1;
  return {dense,
          {.data = dense.const_data_ptr(),
           .stride = dense.size(across) <= 1 ? dense.size(3 - across) : dense.stride(across),
           .group_stride = dense.stride(0),
           .by_columns = by_columns,
           .is_cut = false}};
}

#if MOE_PARALLEL_BUILT_WITH_CUTLASS
bool run_on_tensor_cores(const at::Tensor& x, const GroupedProduct& task) {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  const int capability = 10 * properties->major + properties->minor;
  const Device device{.index = at::cuda::current_device(),
                      .multiprocessors = properties->multiProcessorCount,
                      .runs_ampere = capability >= 80,
                      .runs_hopper = capability == 90 && MOE_PARALLEL_BUILT_FOR_HOPPER};
  if (!cutlass_takes(task, device, may_use_tf32())) return false;
  const auto workspace = at::empty({cutlass_workspace(task, device)}, x.options().dtype(at::kByte));
  const char* problem =
      run_on_cutlass(task, device, workspace.mutable_data_ptr(), at::cuda::getCurrentCUDAStream());
  TORCH_CHECK(problem == nullptr, "CUTLASS refused a grouped product of ", task.groups,
              " groups and ", task.rows, " rows: ", problem);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return true;
}

constexpr bool loop_is_faster(const at::Tensor&) { return false; }
constexpr bool run_in_torch(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, bool) {
  return false;
}
#else
bool run_on_tensor_cores(const at::Tensor&, const GroupedProduct&) { return false; }

// Without CUTLASS, only cuBLAS uses tensor cores.
bool loop_is_faster(const at::Tensor& x) {
  return x.element_size() == 2 || (x.scalar_type() == at::kFloat && may_use_tf32());
}

// Torch's own grouped product, which does not wait for the counts on Hopper.
bool run_in_torch(const at::Tensor& out, const at::Tensor& x, const at::Tensor& w,
                  const at::Tensor& counts, bool accumulate) {
  const auto is_aligned = [](const at::Tensor& t) {
    bool aligned = are_aligned({t.const_data_ptr()}, {}, t.element_size());
    for (int64_t stride : t.strides()) {
      aligned &= stride == 1 || are_aligned({}, {stride}, t.element_size());
    }
    return aligned;
  };
  if (x.scalar_type() != at::kBFloat16 || at::cuda::getCurrentDeviceProperties()->major != 9 ||
      x.size(0) == 0 || !is_aligned(x) || !is_aligned(w)) {
    return false;
  }
  const auto product = at::_grouped_mm(x, w, counts.cumsum(0, at::kInt));
  accumulate ? out.add_(product) : out.copy_(product);
  return true;
}
#endif

template <class Task>
void launch_on_cuda(const Task& task) {
  run_on_cuda(task, at::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void run(const at::Tensor& x, const at::Tensor& counts, GroupedProduct task) {
  const auto counts_1d = counts.contiguous();
  const auto offsets = at::empty({task.groups + 1}, counts.options());
  launch_on_cuda(GroupOffsets{.counts = counts_1d.const_data_ptr<int64_t>(),
                              .offsets = offsets.mutable_data_ptr<int64_t>(),
                              .groups = task.groups,
                              .rows = task.rows});
  task.offsets = offsets.const_data_ptr<int64_t>();
  if (!run_on_tensor_cores(x, task)) launch_on_cuda(task);
}

// Runs `product` on `out`, or on a copy of it with dense rows.
template <class Product>
void with_dense_rows(at::Tensor& out, const Product& product) {
  if (is_dense(out, out.dim() - 1)) return product(out);
  auto dense = out.contiguous();
  product(dense);
  out.copy_(dense);
}

}  // namespace

bool grouped_gemm_on_cuda(at::Tensor& out, const at::Tensor& x, const at::Tensor& w,
                          const at::Tensor& counts, bool accumulate) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (run_in_torch(out, x, w, counts, accumulate)) return true;
  if (loop_is_faster(x)) return false;
  if (out.numel() == 0) return true;
  const auto a = rows_of_groups(x, /*transposed=*/false), b = matrices(w);
  with_dense_rows(out, [&](const at::Tensor& d) {
    run(x, counts,
        {.type = scalar_type_of("x", x),
         .out_type = scalar_type_of("out", d),
         .a = a.matrix,
         .b = b.matrix,
         .d = rows_of_groups(d, false).matrix,
         .offsets = nullptr,
         .groups = counts.size(0),
         .rows = x.size(0),
         .m = kRagged,
         .n = w.size(2),
         .k = w.size(1),
         .accumulate = accumulate});
  });
  return true;
}

bool grouped_outer_on_cuda(at::Tensor& out, const at::Tensor& x, const at::Tensor& y,
                           const at::Tensor& counts, bool accumulate) {
  if (loop_is_faster(x)) return false;
  if (out.numel() == 0) return true;
  const c10::cuda::CUDAGuard guard(x.device());
  const auto a = rows_of_groups(x, /*transposed=*/true), b = rows_of_groups(y, false);
  with_dense_rows(out, [&](const at::Tensor& d) {
    run(x, counts,
        {.type = scalar_type_of("x", x),
         .out_type = scalar_type_of("out", d),
         .a = a.matrix,
         .b = b.matrix,
         .d = matrices(d).matrix,
         .offsets = nullptr,
         .groups = counts.size(0),
         .rows = x.size(0),
         .m = x.size(1),
         .n = y.size(1),
         .k = kRagged,
         .accumulate = accumulate});
  });
  return true;
}

}  // namespace moe_parallel
