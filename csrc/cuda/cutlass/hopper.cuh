// Grouped products for sm_90a. TMA fills shared memory, and two consumer warpgroups multiply
// (wgmma). The blocks are persistent: each computes tile after tile, whatever the sizes of the
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

// The warpgroups alternate, so that the epilogue of one overlaps with the products of the other.
struct PingPong {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

struct SquareTile : PingPong {
  using Shape = cute::Shape<cute::_128, cute::_128, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;  // two tiles share the loads of b
};

// For a dimension of 64 to 256. Without a cluster, no second tile of rows is computed in vain.
struct NarrowTile : PingPong {
  using Shape = cute::Shape<cute::_128, cute::_64, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
};

// Both warpgroups multiply one tile, 64 rows each. For as many products, two thirds as many bytes
// are read from L2 as for square tiles, but nothing overlaps with the epilogue.
struct WideTile {
  using Shape = cute::Shape<cute::_128, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

template <class Element, class Out, class LayoutA, class LayoutB, class Of>
struct HopperProduct {
  using Problem = cute::Shape<int, int, int>;
  using Problems = cutlass::gemm::GroupProblemShape<Problem>;
  using Tile = typename Of::Shape;
  using Cluster = typename Of::Cluster;
  using LayoutD = cutlass::layout::RowMajor;
  static constexpr int kAlignment = 16 / sizeof(Element), kOutAlignment = 16 / sizeof(Out);

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Out, LayoutD*, kOutAlignment,
      Out, LayoutD*, kOutAlignment, typename Of::Epilogue>::CollectiveOp;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
      sizeof(typename Epilogue::SharedStorage))>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA*, kAlignment, Element,
      LayoutB*, kAlignment, float, Tile, Cluster, Stages, typename Of::Mainloop>::CollectiveOp;
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
    // Tile after tile down the rows of a group, then the next column of tiles: the rows of a group
    // stay in L2, and its matrix is read once. A larger swizzle would have no effect, because the
    // host does not know the sizes of the groups.
    to.scheduler.raster_order = cutlass::gemm::kernel::detail::RasterOrderOptions::AlongM;
    to.scheduler.max_swizzle_size = 1;
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

template <class Element, class Out, class LayoutA, class LayoutB>
constexpr HopperTiles hopper_tiles() {
  return {.square = instantiation_of<HopperProduct<Element, Out, LayoutA, LayoutB, SquareTile>>(),
          .wide = instantiation_of<HopperProduct<Element, Out, LayoutA, LayoutB, WideTile>>(),
          .narrow = instantiation_of<HopperProduct<Element, Out, LayoutA, LayoutB, NarrowTile>>()};
}

}  // namespace moe_parallel
