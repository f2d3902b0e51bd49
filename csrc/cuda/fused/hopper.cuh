// The fused product for sm_90a. A block has three warpgroups: one copies (the producer), and two
// multiply (the consumers, each with 64 rows and 128 columns of both accumulators). They share a
// ring of four stages of shared memory. The blocks are persistent, and the copies of a tile begin
// while the previous tile is multiplied.
//
// The copies use cp.async, because TMA does not gather rows. A stage is full when the copies of all
// producer threads have arrived at its barrier. The copies write through the generic proxy, and
// wgmma reads through the async proxy. The barrier orders threads, not proxies, so each consumer
// executes a proxy fence after its wait. A stage is empty when the products that read it have
// ended. A consumer knows that one stage later, because it leaves one group of products in flight.
#pragma once

#include "../launch.cuh"
#include "hopper_loads.cuh"
#include "strip.cuh"

namespace moe_parallel::fused::hopper {

constexpr int kWarpsPerGroup = 4, kConsumerGroups = 2;
constexpr int kBlock = kProducers + kConsumerGroups * kWarpsPerGroup * kWarp;

// Registers per thread: at launch, and after the producers have given registers to the consumers.
constexpr int kAtLaunch = 168, kOfProducer = 72, kOfConsumer = 216;
static_assert(kOfProducer * kProducers + kOfConsumer * (kBlock - kProducers) <= kAtLaunch * kBlock);
static_assert(kAtLaunch * kBlock <= 65536);

// Whether `second` has columns: of a matrix of its own, or after those of `first`.
template <bool kSideBySide>
__device__ inline bool has_second(const FusedProduct& product, const Tile& tile) {
  return !kSideBySide || column_of<kSideBySide>(tile, 1) < product.columns;
}

__device__ inline int stages_of(const ProductPart& part) {
  return (static_cast<int>(part.depth) + kDepth - 1) / kDepth;
}

template <class Scalar, bool kByColumns, bool kSideBySide>
__device__ inline void load_part(const FusedProduct& product, const ProductPart& part,
                                 const Tile& tile, Ring& ring) {
  const RowLoads<Scalar> rows(part, tile);
  const auto columns_of = [&](const GroupedMatrix& matrix, int half) {
    return ColumnLoads<Scalar, kByColumns>(product, part, matrix, tile.group,
                                           column_of<kSideBySide>(tile, half));
  };
  const auto firsts = columns_of(part.first, 0), seconds = columns_of(part.second, 1);
  const bool loads_second = has_second<kSideBySide>(product, tile);
  for (int i = 0; i < stages_of(part); ++i, ring.advance()) {
    const int stage = ring.stage();
    // Waits for the parity of the previous phase. At the start there is no such phase, and the wait
    // returns at once.
    ptx::wait(barriers().empty[stage], ring.parity() ^ 1);
    rows.start(slab_of(stage, kA), i * kDepth);
    firsts.start(slab_of(stage, kFirst), i * kDepth);
    if (loads_second) seconds.start(slab_of(stage, kSecond), i * kDepth);
    ptx::arrive_after_copies(barriers().full[stage]);
  }
}

// `sums`: of the columns in the first slab, or in both slabs. The loop runs at least once: if it
// could be skipped, ptxas would copy the sums and keep no products in flight.
template <class Scalar, bool kByColumns, class Accumulators>
__device__ inline void multiply_part(int depths, Ring& ring, Accumulators& sums) {
  constexpr int kStep = 16;  // of wgmma's depth
  constexpr int kBytesOfStep = kByColumns ? kStep * 2 : kStep * kLineBytes;
  constexpr int kHalfSlab = kSlabBytes / 2;  // a consumer's rows, or 64 columns of a row-major b
  constexpr int kUnused = 16;
  const int group = warp_in_block() / kWarpsPerGroup - 1;
  int last = -1;
  const auto release = [&](int stage) {
    if (stage >= 0 && lane_index() == 0) ptx::arrive(barriers().empty[stage]);
  };
  do {
    const int stage = ring.stage();
    ptx::wait(barriers().full[stage], ring.parity());
    ptx::order_copies_before_wgmma();
    const uint64_t a = describe(slab_of(stage, kA) + group * kHalfSlab, kUnused);
    const uint64_t b = describe(slab_of(stage, kFirst), kByColumns ? kUnused : kHalfSlab);
    ptx::begin_wgmma();
#pragma unroll
    for (int step = 0; step < kDepth / kStep; ++step) {
      ptx::wgmma<Scalar, kByColumns>(sums, a + (step * kStep * 2 >> 4),
                                     b + (step * kBytesOfStep >> 4));
    }
    ptx::commit_wgmma();
    ptx::wait_for_wgmma<1>();
    release(last);
    last = stage;
    ring.advance();
  } while (--depths > 0);
  ptx::wait_for_wgmma<0>();
  ptx::keep_behind_wait(sums);
  release(last);
}

template <class Scalar, bool kByColumns, bool kSideBySide>
__device__ inline void produce(const FusedProduct& product) {
  Ring ring;
  TileWalk<kTileRows> walk(product, tiles_across<kSideBySide>(product));
  for (; !walk.is_over(); walk.advance()) {
    const Tile tile = walk.tile();
    for (int i = 0; i < product.num_parts; ++i) {
      load_part<Scalar, kByColumns, kSideBySide>(product, product.parts[i], tile, ring);
    }
  }
  ptx::wait_for_all_copies();  // a thread must not end with copies in flight
}

// Multiplies all parts, into both halves of `sums` if is_whole, and otherwise into the first half.
template <class Scalar, bool kByColumns>
__device__ inline void multiply_parts(const FusedProduct& product, bool is_whole, Ring& ring,
                                      ptx::Sums (&sums)[2]) {
  const auto multiply = [&](int part, auto& to) {
    multiply_part<Scalar, kByColumns>(stages_of(product.parts[part]), ring, to);
  };
  if (is_whole) {
    for (int i = 0; i < product.num_parts; ++i) multiply(i, sums);
  } else {
    for (int i = 0; i < product.num_parts; ++i) multiply(i, sums[0]);
  }
}

// The strip of 16 rows of a consumer's warp.
template <bool kSideBySide>
__device__ inline Strip strip_of(const FusedProduct& product, const Tile& tile) {
  const unsigned warp = (threadIdx.x - kProducers) / kWarp, lane = threadIdx.x % kWarp;
  return {.row = tile.first_row + (warp * 16 + lane / 4),
          .end_row = tile.end_row,
          .first_column = column_of<kSideBySide>(tile, 0),
          .second_column = column_of<kSideBySide>(tile, 1),
          .columns = product.columns};
}

template <class Scalar, bool kByColumns, class Epilogue>
__device__ inline void consume(const FusedProduct& product, const Epilogue& epilogue) {
  constexpr bool kSideBySide = Epilogue::kSideBySide;
  Ring ring;
  TileWalk<kTileRows> walk(product, tiles_across<kSideBySide>(product));
  for (; !walk.is_over(); walk.advance()) {
    const bool is_whole = has_second<kSideBySide>(product, walk.tile());
    ptx::Sums sums[2] = {};
    multiply_parts<Scalar, kByColumns>(product, is_whole, ring, sums);
    apply(epilogue, strip_of<kSideBySide>(product, walk.tile()), sums[0], sums[1]);
  }
}

template <class Scalar, bool kByColumns, class Epilogue>
__global__ void __launch_bounds__(kBlock, 1)
    multiply_on_hopper(const __grid_constant__ FusedProduct product, Epilogue epilogue) {
// Without wgmma the kernel is empty, and launch.cuh does not launch it.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::make_barrier(barriers().full[i], kProducers);
      ptx::make_barrier(barriers().empty[i], kConsumerGroups * kWarpsPerGroup);
    }
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    ptx::give_registers_back<kOfProducer>();
    produce<Scalar, kByColumns, Epilogue::kSideBySide>(product);
  } else {
    ptx::take_registers<kOfConsumer>();
    consume<Scalar, kByColumns>(product, epilogue);
  }
#endif
}

}  // namespace moe_parallel::fused::hopper
