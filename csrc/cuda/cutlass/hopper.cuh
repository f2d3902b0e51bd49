// Grouped products for sm_90a. TMA fills shared memory, and wgmma multiplies. Two consumer
// warpgroups alternate (ping-pong), so that the epilogue of one overlaps with the products of the
// other. The blocks are persistent: each computes tile after tile, whatever the sizes of the
// groups.
#pragma once

#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "group_arguments.cuh"
#include "instantiations.h"

namespace moe_parallel {

template <class Element, class Out, class LayoutA, class LayoutB>
struct HopperProduct {
  using Problem = cute::Shape<int, int, int>;
  using Problems = cutlass::gemm::GroupProblemShape<Problem>;
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;  // two tiles share the loads of b
  using LayoutD = cutlass::layout::RowMajor;
  static constexpr int kAlignment = 16 / sizeof(Element), kOutAlignment = 16 / sizeof(Out);

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Out, LayoutD*, kOutAlignment,
      Out, LayoutD*, kOutAlignment,
      cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
      sizeof(typename Epilogue::SharedStorage))>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA*, kAlignment, Element,
      LayoutB*, kAlignment, float, Tile, Cluster, Stages,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problems, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;

  // Only the leading stride is not a compile-time constant, so each of these types has 8 bytes.
  static_assert(sizeof(StrideA) == 8 && sizeof(StrideB) == 8 && sizeof(StrideD) == 8);

  static typename Gemm::Arguments arguments(const GroupedProduct& task, const Device& device,
                                            const GroupArguments<Problem>& groups) {
    typename Gemm::Arguments to{};
    to.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    to.problem_shape = {static_cast<int>(task.groups), groups.problems, nullptr};
    to.mainloop.ptr_A = const_cast<const Element**>(reinterpret_cast<Element**>(groups.a));
    to.mainloop.dA = reinterpret_cast<StrideA*>(groups.a_stride);
    to.mainloop.ptr_B = const_cast<const Element**>(reinterpret_cast<Element**>(groups.b));
    to.mainloop.dB = reinterpret_cast<StrideB*>(groups.b_stride);
    to.epilogue.thread.alpha = 1;
    to.epilogue.thread.beta = task.accumulate ? 1 : 0;
    to.epilogue.ptr_D = reinterpret_cast<Out**>(groups.d);
    to.epilogue.dD = reinterpret_cast<StrideD*>(groups.d_stride);
    to.epilogue.ptr_C = const_cast<const Out**>(to.epilogue.ptr_D);
    to.epilogue.dC = to.epilogue.dD;
    to.hw_info.device_id = device.index;
    to.hw_info.sm_count = device.multiprocessors;
    return to;
  }

  static int64_t own_bytes(int64_t groups) {
    return (GroupArguments<Problem>::bytes(groups) + 255) / 256 * 256;
  }

  static int64_t workspace(const GroupedProduct& task, const Device& device) {
    const GroupArguments<Problem> nowhere(nullptr, task.groups);
    return own_bytes(task.groups) +
           static_cast<int64_t>(Gemm::get_workspace_size(arguments(task, device, nowhere)));
  }

  static const char* run(const GroupedProduct& task, const Device& device, void* memory,
                         cudaStream_t stream) {
    const auto groups = launch_arguments<Problem>(task, memory, stream);
    const auto to = arguments(task, device, groups);
    Gemm gemm;
    auto status = gemm.initialize(to, static_cast<char*>(memory) + own_bytes(task.groups), stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
  }
};

}  // namespace moe_parallel
