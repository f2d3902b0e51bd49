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

// The accumulators that the parts of a product add to. A kernel is compiled for one of these
// values. If the kernel selected the accumulators of each part at run time, ptxas would not find
// the registers to keep products in flight.
enum class Parts {
  kForBoth,     // every part adds to both accumulators
  kForOneEach,  // the first part adds to `first`, the second to `second`
};

template <Parts kParts>
bool fits(const FusedProduct& product) {
  bool does = kParts == Parts::kForBoth || product.num_parts == 2;
  for (int i = 0; i < product.num_parts; ++i) {
    const auto& part = product.parts[i];
    const bool both = kParts == Parts::kForBoth;
    does = does && (part.first.data != nullptr) == (both || i == 0) &&
           (part.second.data != nullptr) == (both || i == 1);
  }
  return does;
}

// If each part adds to one accumulator, the parts run one after the other, and each uses the
// registers of both accumulators for 256 columns. The sums of `first` are kept until those of
// `second` are computed. They are rounded to the product's type, so they take half as many
// registers.
template <Parts kParts, class Epilogue>
constexpr bool kIsWide = Epilogue::kSideBySide || kParts == Parts::kForOneEach;

// Whether the second half of a wide tile has columns.
template <bool kWide>
__device__ inline bool has_second(const FusedProduct& product, const Tile& tile) {
  return !kWide || column_of<kWide>(tile, 1) < product.columns;
}

__device__ inline int stages_of(const ProductPart& part) {
  return (static_cast<int>(part.depth) + kDepth - 1) / kDepth;
}

template <class Scalar, bool kByColumns, Parts kParts, bool kWide>
__device__ inline void load_part(const FusedProduct& product, int index, const Tile& tile,
                                 Ring& ring) {
  const auto& part = product.parts[index];
  const RowLoads<Scalar> rows(part, tile);
  const auto columns_of = [&](int half) {
    const bool is_first = kParts == Parts::kForBoth ? half == 0 : index == 0;
    return ColumnLoads<Scalar, kByColumns>(product, part, is_first ? part.first : part.second,
                                           tile.group, column_of<kWide>(tile, half));
  };
  const auto firsts = columns_of(0), seconds = columns_of(1);
  const bool loads_second = has_second<kWide>(product, tile);
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

template <class Scalar, bool kByColumns, Parts kParts, bool kWide>
__device__ inline void produce(const FusedProduct& product) {
  Ring ring;
  TileWalk<kTileRows> walk(product, tiles_across<kWide>(product));
  for (; !walk.is_over(); walk.advance()) {
    const Tile tile = walk.tile();
    for (int i = 0; i < product.num_parts; ++i) {
      load_part<Scalar, kByColumns, kParts, kWide>(product, i, tile, ring);
    }
  }
  ptx::wait_for_all_copies();  // a thread must not end with copies in flight
}

// Multiplies the parts from `begin` to `end`, into both halves of `sums` if is_whole, and otherwise
// into the first half.
template <class Scalar, bool kByColumns>
__device__ inline void multiply_parts(const FusedProduct& product, int begin, int end,
                                      bool is_whole, Ring& ring, ptx::Sums (&sums)[2]) {
  const auto multiply = [&](int part, auto& to) {
    multiply_part<Scalar, kByColumns>(stages_of(product.parts[part]), ring, to);
  };
  if (is_whole) {
    for (int i = begin; i < end; ++i) multiply(i, sums);
  } else {
    for (int i = begin; i < end; ++i) multiply(i, sums[0]);
  }
}

// Sums that are kept for later, as pairs of 16-bit elements. The epilogue rounds them in the same
// way.
using Pairs256 = uint32_t[2][16][2];

template <class Scalar>
__device__ inline void put_aside(ptx::Sums (&sums)[2], Pairs256& pairs) {
#pragma unroll
  for (int i = 0; i < 2 * 16 * 2; ++i) {
    float* pair = sums[i / 32][i / 2 % 16] + i % 2 * 2;
    pairs[i / 32][i / 2 % 16][i % 2] = pack<Scalar>(pair[0], pair[1]);
    pair[0] = pair[1] = 0;
  }
}

// Applies the epilogue to the sums of `first`, which were put aside, and to those of `second`. It
// does so 32 columns at a time, so that no more than 32 columns of `first` are in registers twice.
template <class Scalar, class Epilogue>
__device__ inline void finish(const Pairs256& firsts, const ptx::Sums (&seconds)[2], Strip strip,
                              const Epilogue& epilogue) {
  constexpr int kGroups = 4;
  strip.second_column = strip.first_column;
#pragma unroll
  for (int group = 0; group < 2 * 16; group += kGroups) {
    float first[kGroups][4], second[kGroups][4];
#pragma unroll
    for (int i = 0; i < kGroups * 4; ++i) {
      const int half = group / 16, from = group % 16 + i / 4;
      const float2 pair = unpack<Scalar>(firsts[half][from][i % 4 / 2]);
      first[i / 4][i % 4] = i % 2 == 0 ? pair.x : pair.y;
      second[i / 4][i % 4] = seconds[half][from][i % 4];
    }
    apply(epilogue, strip, first, second);
    strip.first_column += kGroups * 8;
    strip.second_column += kGroups * 8;
  }
}

// The strip of 16 rows of a consumer's warp.
template <bool kWide>
__device__ inline Strip strip_of(const FusedProduct& product, const Tile& tile) {
  const unsigned warp = (threadIdx.x - kProducers) / kWarp, lane = threadIdx.x % kWarp;
  return {.row = tile.first_row + (warp * 16 + lane / 4),
          .end_row = tile.end_row,
          .first_column = column_of<kWide>(tile, 0),
          .second_column = column_of<kWide>(tile, 1),
          .columns = product.columns};
}

template <class Scalar, bool kByColumns, Parts kParts, class Epilogue>
__device__ inline void consume(const FusedProduct& product, const Epilogue& epilogue) {
  constexpr bool kWide = kIsWide<kParts, Epilogue>;
  Ring ring;
  TileWalk<kTileRows> walk(product, tiles_across<kWide>(product));
  for (; !walk.is_over(); walk.advance()) {
    const bool is_whole = has_second<kWide>(product, walk.tile());
    const auto multiply = [&](int begin, int end, ptx::Sums(&sums)[2]) {
      multiply_parts<Scalar, kByColumns>(product, begin, end, is_whole, ring, sums);
    };
    ptx::Sums sums[2] = {};
    if constexpr (kParts == Parts::kForBoth) {
      multiply(0, product.num_parts, sums);
      apply(epilogue, strip_of<kWide>(product, walk.tile()), sums[0], sums[1]);
    } else {
      multiply(0, 1, sums);
      Pairs256 firsts;
      put_aside<Scalar>(sums, firsts);
      multiply(1, 2, sums);
      finish<Scalar>(firsts, sums, strip_of<kWide>(product, walk.tile()), epilogue);
    }
  }
}

template <class Scalar, bool kByColumns, Parts kParts, class Epilogue>
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
    produce<Scalar, kByColumns, kParts, kIsWide<kParts, Epilogue>>(product);
  } else {
    ptx::take_registers<kOfConsumer>();
    consume<Scalar, kByColumns, kParts>(product, epilogue);
  }
#endif
}

}  // namespace moe_parallel::fused::hopper
