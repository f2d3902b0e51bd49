// Grouped products for sm_80 and later. cp.async fills shared memory in a pipeline of four stages,
// and mma multiplies. The blocks are persistent: each computes tile after tile, which it finds on
// the device.
#pragma once

#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/device/gemm_grouped.h>
#include <cutlass/gemm/kernel/default_gemm_grouped.h>

#include "group_arguments.cuh"
#include "instantiations.h"

namespace moe_parallel {

template <class Element, class Out, class LayoutA, class LayoutB>
struct AmpereProduct {
  using Problem = cutlass::gemm::GemmCoord;
  static constexpr int kAlignment = 16 / sizeof(Element), kOutAlignment = 16 / sizeof(Out);
  static constexpr int kDepth = 64 / sizeof(Element);  // 64 bytes of k at a time
  using Tile = cutlass::gemm::GemmShape<128, 128, kDepth>;
  using WarpTile = cutlass::gemm::GemmShape<64, 64, kDepth>;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 32 / sizeof(Element)>;
  using Math = cutlass::arch::OpMultiplyAdd;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmGrouped<
      Element, LayoutA, cutlass::ComplexTransform::kNone, kAlignment, Element, LayoutB,
      cutlass::ComplexTransform::kNone, kAlignment, Out, cutlass::layout::RowMajor, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Tile, WarpTile, Instruction,
      cutlass::epilogue::thread::LinearCombination<Out, kOutAlignment, float, float>,
      cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, 4,
      cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly, Math>::GemmKernel;
  using Gemm = cutlass::gemm::device::GemmGrouped<Kernel>;

  static int64_t workspace(const GroupedProduct& task, const Device&) {
    return GroupArguments<Problem>::bytes(task.groups);
  }

  static const char* run(const GroupedProduct& task, const Device& device, void* memory,
                         cudaStream_t stream) {
    const auto groups = launch_arguments<Problem>(task, memory, stream);
    const int blocks = device.multiprocessors * std::max(Gemm::maximum_active_blocks(), 1);
    const typename Gemm::Arguments to(
        groups.problems, static_cast<int>(task.groups), blocks,
        {1.0f, task.accumulate ? 1.0f : 0.0f}, reinterpret_cast<Element**>(groups.a),
        reinterpret_cast<Element**>(groups.b), reinterpret_cast<Out**>(groups.d),
        reinterpret_cast<Out**>(groups.d), groups.a_stride, groups.b_stride, groups.d_stride,
        groups.d_stride);
    Gemm gemm;
    auto status = gemm.initialize(to, nullptr, stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
  }
};

template <class Element>
constexpr Instantiations ampere_instantiations() {
  using Rows = cutlass::layout::RowMajor;
  using Columns = cutlass::layout::ColumnMajor;
  return {.product = instantiation_of<AmpereProduct<Element, Element, Rows, Rows>>(),
          .by_transposed = instantiation_of<AmpereProduct<Element, Element, Rows, Columns>>(),
          .outer = instantiation_of<AmpereProduct<Element, Element, Columns, Rows>>(),
          .outer_in_float = instantiation_of<AmpereProduct<Element, float, Columns, Rows>>()};
}

}  // namespace moe_parallel
