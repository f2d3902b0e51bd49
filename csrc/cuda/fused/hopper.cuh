// The fused product for sm_90a. Of a block's three warpgroups one copies (producer) and two
// multiply (consumers: 64 rows each, 128 columns of both accumulators); four stages of shared
// memory go round between them. Blocks stay, and the copies of a tile begin while the one before is
// multiplied.
//
// Copies are cp.async, as TMA gathers no rows. A stage is full when the copies of all producers
// have arrived at its barrier. They wrote through the generic proxy and wgmma reads through the
// asynchronous one; the barrier orders threads, not proxies, so each consumer puts a proxy fence
// behind its wait. A stage is empty when the products that read it have ended, which a
// consumer knows one stage later, as it leaves one group of products under way.
#pragma once

#include "../launch.cuh"
#include "hopper_loads.cuh"
#include "strip.cuh"

namespace moe_parallel::fused::hopper {

constexpr int kWarpsPerGroup = 4, kConsumerGroups = 2;
constexpr int kBlock = kProducers + kConsumerGroups * kWarpsPerGroup * kWarp;

// Registers of a thread: at launch, and after the producers have given theirs to the consumers.
constexpr int kAtLaunch = 168, kOfProducer = 72, kOfConsumer = 216;
static_assert(kOfProducer * kProducers + kOfConsumer * (kBlock - kProducers) <= kAtLaunch * kBlock);
static_assert(kAtLaunch * kBlock <= 65536);

// Which accumulators the parts of a product add to. A kernel is compiled for one of these: where
// the parts of one differ in it, ptxas finds no registers to have products under way.
enum class Parts {
  kForBoth,     // every part to both
  kForOneEach,  // the first to `first`, the second to `second`
};

template <Parts kParts>
__host__ __device__ inline bool adds_to(Slab slab, int part) {
  return kParts == Parts::kForBoth || (slab == kFirst) == (part == 0);
}

template <Parts kParts>
bool fits(const FusedProduct& product) {
  bool does = kParts == Parts::kForBoth || product.num_parts == 2;
  for (int i = 0; i < product.num_parts; ++i) {
    const auto& part = product.parts[i];
    does = does && adds_to<kParts>(kFirst, i) == (part.first.data != nullptr) &&
           adds_to<kParts>(kSecond, i) == (part.second.data != nullptr);
  }
  return does;
}

// Whether `second` has columns: a last tile of columns side by side may end in `first`.
template <bool kSideBySide>
__device__ inline bool has_second(const FusedProduct& product, const Tile& tile) {
  return !kSideBySide || column_of<kSideBySide>(tile, 1) < product.columns;
}

__device__ inline int64_t stages_of(const ProductPart& part) {
  return (part.depth + kDepth - 1) / kDepth;
}

template <class Scalar, bool kByColumns, Parts kParts, bool kSideBySide>
__device__ inline void load_part(const FusedProduct& product, int index, const Tile& tile,
                                 const Stages& stages, Ring& ring) {
  const auto& part = product.parts[index];
  const RowLoads<Scalar> rows(part, tile);
  const auto columns_of = [&](const GroupedMatrix& matrix, int half) {
    return ColumnLoads<Scalar, kByColumns>(product, part, matrix, tile.group,
                                           column_of<kSideBySide>(tile, half));
  };
  const auto firsts = columns_of(part.first, 0), seconds = columns_of(part.second, 1);
  const bool loads_first = adds_to<kParts>(kFirst, index);
  const bool loads_second =
      adds_to<kParts>(kSecond, index) && has_second<kSideBySide>(product, tile);
  for (int64_t i = 0; i < stages_of(part); ++i, ring.advance()) {
    const int stage = ring.stage();
    // The parity of the phase before: at the start there is none, and the wait returns at once.
    ptx::wait(stages.barriers().empty[stage], ring.parity() ^ 1);
    rows.start(stages.slab(stage, kA), i * kDepth);
    if (loads_first) firsts.start(stages.slab(stage, kFirst), i * kDepth);
    if (loads_second) seconds.start(stages.slab(stage, kSecond), i * kDepth);
    ptx::arrive_after_copies(stages.barriers().full[stage]);
  }
}

// `sums`: of one accumulator, whose columns are in `slab`, or of both from kFirst on. At least one
// stage: with a loop that may be left out, ptxas copies sums and has no products under way.
template <class Scalar, bool kByColumns, class Accumulators>
__device__ inline void multiply_part(int64_t depths, const Stages& stages, Slab slab, int group,
                                     Ring& ring, Accumulators& sums) {
  constexpr int kStep = 16;  // of wgmma's depth
  constexpr int kBytesOfStep = kByColumns ? kStep * 2 : kStep * kLineBytes;
  constexpr int kHalfSlab = kSlabBytes / 2;  // the rows of a consumer, and 64 columns by rows
  constexpr int kUnused = 16;
  int last = -1;
  const auto release = [&](int stage) {
    if (stage >= 0 && lane_index() == 0) ptx::arrive(stages.barriers().empty[stage]);
  };
  do {
    const int stage = ring.stage();
    ptx::wait(stages.barriers().full[stage], ring.parity());
    ptx::order_copies_before_wgmma();
    const uint64_t a = describe(stages.slab(stage, kA) + group * kHalfSlab, kUnused);
    const uint64_t b = describe(stages.slab(stage, slab), kByColumns ? kUnused : kHalfSlab);
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

template <class Scalar, bool kByColumns, Parts kParts, bool kSideBySide>
__device__ inline void produce(const FusedProduct& product, const Stages& stages) {
  Ring ring;
  TileWalk<kTileRows> walk(product, tiles_across<kSideBySide>(product));
  for (; !walk.is_over(); walk.advance()) {
    const Tile tile = walk.tile();
    for (int i = 0; i < product.num_parts; ++i) {
      load_part<Scalar, kByColumns, kParts, kSideBySide>(product, i, tile, stages, ring);
    }
  }
}

template <class Scalar, bool kByColumns, Parts kParts>
__device__ inline void multiply_parts(const FusedProduct& product, const Stages& stages, int group,
                                      bool has_second, Ring& ring, ptx::Sums (&sums)[2]) {
  const auto multiply = [&](int part, Slab slab, auto& to) {
    multiply_part<Scalar, kByColumns>(stages_of(product.parts[part]), stages, slab, group, ring,
                                      to);
  };
  if constexpr (kParts == Parts::kForOneEach) {
    multiply(0, kFirst, sums[0]);
    multiply(1, kSecond, sums[1]);
  } else if (has_second) {
    for (int i = 0; i < product.num_parts; ++i) multiply(i, kFirst, sums);
  } else {
    for (int i = 0; i < product.num_parts; ++i) multiply(i, kFirst, sums[0]);
  }
}

template <class Scalar, bool kByColumns, Parts kParts, class Epilogue>
__device__ inline void consume(const FusedProduct& product, const Stages& stages,
                               const Epilogue& epilogue) {
  constexpr bool kSideBySide = Epilogue::kSideBySide;
  const int warp = warp_in_block() - kProducers / kWarp;
  Ring ring;
  TileWalk<kTileRows> walk(product, tiles_across<kSideBySide>(product));
  for (; !walk.is_over(); walk.advance()) {
    ptx::Sums sums[2] = {};
    const Tile tile = walk.tile();
    multiply_parts<Scalar, kByColumns, kParts>(product, stages, warp / kWarpsPerGroup,
                                               has_second<kSideBySide>(product, tile), ring, sums);
    epilogue(Strip{.row = tile.first_row + warp * 16 + lane_index() / 4,
                   .end_row = tile.end_row,
                   .first_column = column_of<kSideBySide>(tile, 0),
                   .second_column = column_of<kSideBySide>(tile, 1),
                   .columns = product.columns},
             sums[0], sums[1]);
  }
}

template <class Scalar, bool kByColumns, Parts kParts, class Epilogue>
__global__ void __launch_bounds__(kBlock, 1)
    multiply_on_hopper(const __grid_constant__ FusedProduct product, Epilogue epilogue) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Stages stages(ptx::shared_memory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::make_barrier(stages.barriers().full[i], kProducers);
      ptx::make_barrier(stages.barriers().empty[i], kConsumerGroups * kWarpsPerGroup);
    }
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    ptx::give_registers_back<kOfProducer>();
    produce<Scalar, kByColumns, kParts, Epilogue::kSideBySide>(product, stages);
  } else {
    ptx::take_registers<kOfConsumer>();
    consume<Scalar, kByColumns, kParts>(product, stages, epilogue);
  }
#endif
}

}  // namespace moe_parallel::fused::hopper
