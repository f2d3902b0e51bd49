// The squares of C = x W of all experts, summed while C is still in registers, for sm_90a. Where
// the selection needs nothing but the norms, C is never in memory. On an H200 norm_topk takes 0.75
// to 0.89 of the time of a product and a kernel that reads it.
//
// A block computes 128 rows and 256 columns of C at a time. It has three warpgroups: one copies
// (the producer), and two multiply (the consumers, each with 64 rows). They share a ring of four
// stages of shared memory. The blocks are persistent, and the copies of a tile begin while the
// previous tile is multiplied.
//
// A stage is full when the copies of all producer threads have arrived at its barrier. The copies
// (cp.async) write through the generic proxy, and wgmma reads through the async proxy. The barrier
// orders threads, not proxies, so each consumer executes a proxy fence after its wait. A stage is
// empty when the products that read it have ended. A consumer knows that one stage later, because
// it leaves one group of products in flight.
//
// A stage holds 128 rows of x and 256 columns of W, with a depth of 64, in lines of 128 bytes:
//   of x:  one row, with its 64 elements of depth;
//   of W:  64 columns at one depth. 64 lines hold the first 64 columns, the next 64 lines the next
//          columns.
// The 16-byte pieces of a line are swizzled: piece p of line l is at the place of piece
// p ^ (l % 8), so that the same piece of eight consecutive lines is in eight different banks. wgmma
// undoes this from the bits of the address ("128-byte swizzle"), which is why both parts begin at a
// multiple of 1024.
#include "../alignment.h"
#include "../norm_topk.h"
#include "build_config.h"
#include "hopper_ptx.cuh"
#include "launch.cuh"

namespace moe_parallel {

#if MOE_PARALLEL_BUILT_FOR_HOPPER

namespace {

constexpr int kTileRows = 128, kTileColumns = 256;
constexpr int kBand = 16;  // rows of tiles that share W in the L2 cache

constexpr int kDepth = 64;  // of a stage
constexpr int kStages = 4;
constexpr int kLineBytes = 128, kPieces = 8, kPieceBytes = 16;
constexpr int kLineElements = 64, kPieceElements = 8;  // of 16 bits
constexpr int kPanels = kTileColumns / kLineElements;
constexpr int kPanelBytes = kDepth * kLineBytes;  // 64 columns of W
constexpr int kRowsBytes = kTileRows * kLineBytes;
constexpr int kStageBytes = kRowsBytes + kPanels * kPanelBytes;

struct Barriers {
  ptx::Barrier full[kStages], empty[kStages];
};

constexpr int kSharedBytes = kStages * kStageBytes + static_cast<int>(sizeof(Barriers));

constexpr int kProducers = 128;
constexpr int kWarpsPerGroup = 4, kConsumerGroups = 2;
constexpr int kBlock = kProducers + kConsumerGroups * kWarpsPerGroup * kWarp;

// Registers per thread: at launch, and after the producers have given registers to the consumers.
constexpr int kAtLaunch = 168, kOfProducer = 72, kOfConsumer = 216;
static_assert(kOfProducer * kProducers + kOfConsumer * (kBlock - kProducers) <= kAtLaunch * kBlock);
static_assert(kAtLaunch * kBlock <= 65536);

// The compiler knows these addresses, so that they take no registers.
__device__ inline ptx::SharedAddress rows_of(int stage) {
  return ptx::shared_address(ptx::shared_memory()) + stage * kStageBytes;
}
__device__ inline ptx::SharedAddress columns_of(int stage) { return rows_of(stage) + kRowsBytes; }
__device__ inline Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(ptx::shared_memory() + kStages * kStageBytes);
}

// A thread's place among the stages. Producers and consumers go through the stages in the same
// order, across all tiles.
class Ring {
 public:
  __device__ int stage() const { return index_ % kStages; }
  // The parity of the phase in which the stage is filled, or emptied, in this round.
  __device__ uint32_t parity() const { return index_ / kStages % 2; }
  __device__ void advance() { ++index_; }

 private:
  uint32_t index_ = 0;
};

__host__ __device__ inline int64_t columns_of_all(const SumSquares& task) {
  return task.num_experts * task.rank;
}
__host__ __device__ inline int64_t tiles_down(const SumSquares& task) {
  return (task.tokens + kTileRows - 1) / kTileRows;
}
__host__ __device__ inline int64_t tiles_across(const SumSquares& task) {
  return (columns_of_all(task) + kTileColumns - 1) / kTileColumns;
}

struct Tile {
  int64_t first_row, first_column;
};

// Calls body(tile) for every gridDim.x-th tile: those of a block. Bands of kBand rows of tiles
// follow one another, each of them from left to right.
template <class Body>
__device__ inline void for_each_tile(const SumSquares& task, const Body& body) {
  const int all_down = static_cast<int>(tiles_down(task));
  const int across = static_cast<int>(tiles_across(task));
  for (int i = static_cast<int>(blockIdx.x); i < all_down * across; i += gridDim.x) {
    const int band = i / (kBand * across), in_band = i % (kBand * across);
    const int down = min(kBand, all_down - band * kBand);
    body(Tile{int64_t{band * kBand + in_band % down} * kTileRows,
              int64_t{in_band / down} * kTileColumns});
  }
}

__device__ inline int stages_of(const SumSquares& task) {
  return static_cast<int>((task.depth + kDepth - 1) / kDepth);
}

// How the threads of the producer fill the stages of a tile. Eight threads copy a line at a time,
// 16 lines apart, so the lines of a thread are all the same modulo 8 and have the same swizzle.
template <class Scalar>
class TileCopies {
 public:
  __device__ TileCopies(const SumSquares& task, const Tile& tile) : task_(task) {
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const int64_t row = tile.first_row + first_line() + i * kLinesApart;
      rows_[i] = row < task.tokens ? static_cast<const Scalar*>(task.x) + row * task.x_stride +
                                         piece() * kPieceElements
                                   : nullptr;
    }
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int64_t column = tile.first_column + panel * kLineElements + piece() * kPieceElements;
      const int64_t expert = column / task.rank, in_expert = column % task.rank;
      columns_[panel] = expert < task.num_experts
                            ? static_cast<const Scalar*>(task.w) + expert * task.expert_stride +
                                  first_line() * task.w_stride + in_expert
                            : nullptr;
    }
  }

  __device__ void start(int stage, int depth) const {
    const int left = static_cast<int>(task_.depth) - depth;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      ptx::copy_or_clear(place(rows_of(stage), i), rows_[i] + depth,
                         rows_[i] && piece() * kPieceElements < left, task_.x);
    }
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const auto* from = columns_[panel] + depth * task_.w_stride;
#pragma unroll
      for (int i = 0; i < kPanelCopies; ++i, from += kLinesApart * task_.w_stride) {
        ptx::copy_or_clear(place(columns_of(stage) + panel * kPanelBytes, i), from,
                           columns_[panel] && first_line() + i * kLinesApart < left, task_.w);
      }
    }
  }

 private:
  static constexpr int kLinesApart = kProducers / kPieces;
  static constexpr int kRowCopies = kTileRows / kLinesApart, kPanelCopies = kDepth / kLinesApart;

  static __device__ int first_line() { return static_cast<int>(threadIdx.x / kPieces); }
  static __device__ int piece() { return static_cast<int>(threadIdx.x % kPieces); }

  // Of this thread's i-th copy to lines that begin at `lines`.
  static __device__ ptx::SharedAddress place(ptx::SharedAddress lines, int i) {
    const int swizzled = piece() ^ (first_line() % 8);
    return lines + (first_line() + i * kLinesApart) * kLineBytes + swizzled * kPieceBytes;
  }

  const SumSquares& task_;
  const Scalar *rows_[kRowCopies], *columns_[kPanels];  // at depth 0; null: zeros
};

template <class Scalar>
__device__ inline void produce(const SumSquares& task) {
  Ring ring;
  for_each_tile(task, [&](const Tile& tile) {
    const TileCopies<Scalar> copies(task, tile);
    for (int i = 0; i < stages_of(task); ++i, ring.advance()) {
      // Waits for the parity of the previous phase. At the start there is no such phase, and the
      // wait returns at once.
      ptx::wait(barriers().empty[ring.stage()], ring.parity() ^ 1);
      copies.start(ring.stage(), i * kDepth);
      ptx::arrive_after_copies(barriers().full[ring.stage()]);
    }
  });
  ptx::wait_for_all_copies();  // a thread must not end with copies in flight
}

// The descriptor of a matrix in shared memory for wgmma: where the matrix begins, the bytes between
// its parts in both directions, and the swizzle. Addresses and distances are in units of 16 bytes.
// The names are those of the PTX ISA ("matrix descriptor format"):
//   stride:   from 8 lines to the next 8 lines;
//   leading:  from 64 columns of W to the next 64 columns. Of x it is unused, and 16 by convention.
__device__ inline uint64_t describe(ptx::SharedAddress start, int leading_bytes) {
  constexpr uint64_t kSwizzle128Bytes = 1, kStrideBytes = 8 * kLineBytes;
  return uint64_t{(start & 0x3ffff) >> 4} | uint64_t(leading_bytes >> 4) << 16 |
         kStrideBytes >> 4 << 32 | kSwizzle128Bytes << 62;
}

// The sums of a tile. The loop runs at least once: if it could be skipped, ptxas would copy the
// sums and keep no products in flight.
template <class Scalar>
__device__ inline void multiply(int stages, Ring& ring, ptx::Sums& sums) {
  constexpr int kStep = 16;  // of wgmma's depth
  const int group = warp_in_block() / kWarpsPerGroup - kProducers / kWarp / kWarpsPerGroup;
  int last = -1;
  const auto release = [&](int stage) {
    if (stage >= 0 && lane_index() == 0) ptx::arrive(barriers().empty[stage]);
  };
  do {
    const int stage = ring.stage();
    ptx::wait(barriers().full[stage], ring.parity());
    ptx::order_copies_before_wgmma();
    const uint64_t x = describe(rows_of(stage) + group * kRowsBytes / kConsumerGroups, 16);
    const uint64_t w = describe(columns_of(stage), kPanelBytes);
    ptx::begin_wgmma();
#pragma unroll
    for (int step = 0; step < kDepth / kStep; ++step) {
      ptx::wgmma(sums, x + (step * kStep * 2 >> 4), w + (step * kStep * kLineBytes >> 4), Scalar{});
    }
    ptx::commit_wgmma();
    ptx::wait_for_wgmma<1>();
    release(last);
    last = stage;
    ring.advance();
  } while (--stages > 0);
  ptx::wait_for_wgmma<0>();
  ptx::keep_behind_wait(sums);
  release(last);
}

// This lane's place among the four lanes of a row.
__device__ inline int quad_lane() { return lane_index() % 4; }

__device__ inline float sum_over_quad(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// x[i] of lane q becomes x[q] of lane i.
__device__ inline void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = quad_lane() & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + bit], bit);
      (upper ? x[i] : x[i + bit]) = other;
    }
  }
}

// Of a tile, 32 columns of a row at a time. Its four lanes exchange what they have of C, so that
// each writes 16 bytes.
template <class Scalar>
__device__ inline void write(const SumSquares& task, const Tile& tile, const ptx::Sums& sums) {
  const int64_t columns = columns_of_all(task);
  const int first_row = static_cast<int>(threadIdx.x - kProducers) / kWarp * 16 + lane_index() / 4;
#pragma unroll
  for (int group = 0; group < kTileColumns / 8; group += 4) {
    const int64_t column = tile.first_column + 8 * group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = tile.first_row + first_row + 8 * half;
      const bool is_there = row < task.tokens && column < columns;
      uint32_t c[4];
      float squares = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = sums[group + i] + 2 * half;
        squares += pair[0] * pair[0] + pair[1] * pair[1];
        c[i] = ptx::round_pair(pair[0], pair[1], Scalar{});
      }
      squares = sum_over_quad(squares);
      if (is_there && quad_lane() == 0) {
        task.squares[(row * columns + column) / kColumnsOfSquares] = squares;
      }
      if (!task.c) continue;
      transpose_quad(c);
      if (is_there) {
        ptx::store_vector(static_cast<Scalar*>(task.c) + row * columns + column + 8 * quad_lane(),
                          c);
      }
    }
  }
}

template <class Scalar>
__device__ inline void consume(const SumSquares& task) {
  Ring ring;
  for_each_tile(task, [&](const Tile& tile) {
    ptx::Sums sums = {};
    multiply<Scalar>(stages_of(task), ring, sums);
    write<Scalar>(task, tile, sums);
  });
}

template <class Scalar>
__global__ void __launch_bounds__(kBlock, 1) sum_squares(const __grid_constant__ SumSquares task) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::make_barrier(barriers().full[i], kProducers);
      ptx::make_barrier(barriers().empty[i], kConsumerGroups * kWarpsPerGroup);
    }
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    ptx::give_registers_back<kOfProducer>();
    produce<Scalar>(task);
  } else {
    ptx::take_registers<kOfConsumer>();
    consume<Scalar>(task);
  }
}

int attribute(cudaDeviceAttr attribute) {  // of the current GPU
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// Whether the current GPU has wgmma: sm_90a runs only on compute capability 9.0.
bool runs_hopper() {
  return attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

// Whether the kernel takes the product: 16-bit elements, rows and addresses that are multiples of
// 16 bytes, and sizes that it counts in 32 bits.
bool takes(const SumSquares& task) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (task.type != ScalarType::kBFloat16 && task.type != ScalarType::kFloat16) return false;
  if (task.tokens == 0 || task.depth == 0 || columns_of_all(task) == 0) return false;
  return task.rank % kColumnsOfSquares == 0 && task.depth < kMost &&
         tiles_down(task) * tiles_across(task) < kMost &&
         are_aligned({task.x, task.w, task.c},
                     {task.depth, task.x_stride, task.w_stride, task.expert_stride}, 2);
}

template <class Scalar>
void launch(const SumSquares& task, cudaStream_t stream) {
  const cudaError_t refused = cudaFuncSetAttribute(
      sum_squares<Scalar>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (refused != cudaSuccess) return;  // the caller checks the last error
  const int64_t tiles = tiles_down(task) * tiles_across(task);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(
      static_cast<unsigned>(std::min<int64_t>(tiles, attribute(cudaDevAttrMultiProcessorCount))));
  config.blockDim = dim3(kBlock);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  cudaLaunchKernelEx(&config, sum_squares<Scalar>, task);
}

}  // namespace

bool run_on_cuda(const SumSquares& task, cudaStream_t stream) {
  if (!runs_hopper() || !takes(task)) return false;
  task.type == ScalarType::kBFloat16 ? launch<__nv_bfloat16>(task, stream)
                                     : launch<__half>(task, stream);
  return true;
}

#else
bool run_on_cuda(const SumSquares&, cudaStream_t) { return false; }
#endif

}  // namespace moe_parallel
