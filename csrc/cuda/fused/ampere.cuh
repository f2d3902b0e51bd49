// The fused product for sm_80 and later. cp.async gathers rows into shared memory, three stages
// ahead, and mma multiplies. The blocks are persistent, and their loads continue from tile to tile:
// the first stages of a tile arrive while the previous tile is in its epilogue.
#pragma once

#include "ptx.cuh"
#include "strip.cuh"
#include "tiles.cuh"

namespace moe_parallel::fused {

// The elements have 16 bits. There are eight warps, two down and four across. Each has 64 rows and
// 32 columns of each accumulator, which makes 128 sums per thread.
struct AmpereTile {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns;
  static constexpr int kDepth = 32;  // elements of a row, 64 bytes
  static constexpr int kStages = 4;
  static constexpr int kWarpsAcross = 4;
  static constexpr int kStrips = kRows / (kWarpsPerBlock / kWarpsAcross) / 16;
  static constexpr int kGroups = kColumns / kWarpsAcross / 8;
  static constexpr int kVector = 8;         // elements in 16 bytes
  static constexpr int kPanelBytes = 8192;  // a, the b of `first` or the b of `second` in one stage
  static constexpr int kStageBytes = 3 * kPanelBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kPanelBytes == 2 * kRows * kDepth && kPanelBytes == 2 * kColumns * kDepth);
};

// The place of a chunk of 16 bytes in a panel. A panel has rows of 64 bytes (a, and a column-major
// b) or of 256 bytes (a row-major b). The chunks are swizzled, so that the eight rows that ldmatrix
// reads at once are in different banks.
__device__ inline ptx::SharedAddress in_narrow_rows(int row, int chunk) {
  return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}
__device__ inline ptx::SharedAddress in_wide_rows(int row, int chunk) {
  return row * 256 + ((chunk ^ (row & 7)) << 4);
}

__device__ inline int depth_of(const ProductPart& part) { return static_cast<int>(part.depth); }

// Loads the stages of a block's tiles one after the other. Each thread copies two chunks of each
// panel.
template <class Scalar, bool kByColumns, bool kSideBySide>
class AmpereLoader {
  using Tiles = TileWalk<AmpereTile::kRows>;

 public:
  __device__ AmpereLoader(const FusedProduct& product, ptx::SharedAddress memory)
      : product_(product), tiles_(product, tiles_across<kSideBySide>(product)), memory_(memory) {
    locate();
  }

  // Loads the next stage as one group of copies. After the last stage the group is empty.
  __device__ void load() {
    if (!tiles_.is_over()) {
      const ProductPart& part = product_.parts[part_];
      const ptx::SharedAddress stage = memory_ + slot_ * AmpereTile::kStageBytes;
      load_a(part, stage);
      load_b(part, part.first, 0, stage + AmpereTile::kPanelBytes);
      load_b(part, part.second, 1, stage + 2 * AmpereTile::kPanelBytes);
      advance();
    }
    ptx::commit_copies();
    slot_ = (slot_ + 1) % AmpereTile::kStages;
  }

 private:
  // A thread has two narrow rows, 64 apart, or two wide rows, 16 apart.
  static __device__ int narrow_row() { return static_cast<int>(threadIdx.x) / 4; }
  static __device__ int narrow_chunk() { return static_cast<int>(threadIdx.x) % 4; }
  static __device__ int wide_row() { return static_cast<int>(threadIdx.x) / 16; }
  static __device__ int wide_chunk() { return static_cast<int>(threadIdx.x) % 16; }

  __device__ void advance() {
    depth_ += AmpereTile::kDepth;
    if (depth_ < depth_of(product_.parts[part_])) return;
    depth_ = 0;
    if (++part_ == product_.num_parts) {
      part_ = 0;
      tiles_.advance();
    }
    locate();
  }

  // Computes the addresses that this thread reads for a tile and a part, at depth 0.
  __device__ void locate() {
    if (tiles_.is_over()) return;
    const ProductPart& part = product_.parts[part_];
    const Tile tile = tiles_.tile();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = tile.first_row + narrow_row() + 64 * i;
      const int64_t source = row < tile.end_row ? source_of(part.a, row) : -1;
      a_[i] = source < 0 ? nullptr
                         : static_cast<const Scalar*>(part.a.data) + source * part.a.stride +
                               narrow_chunk() * AmpereTile::kVector;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const GroupedMatrix& matrix = half == 0 ? part.first : part.second;
      const int64_t column = column_of<kSideBySide>(tile, half) +
                             (kByColumns ? narrow_row() : wide_chunk() * AmpereTile::kVector);
      const int64_t group = tile.group + column / product_.columns_per_matrix;
      const int64_t in_matrix = column % product_.columns_per_matrix;
      const int64_t element = kByColumns
                                  ? in_matrix * matrix.stride + narrow_chunk() * AmpereTile::kVector
                                  : wide_row() * matrix.stride + in_matrix;
      b_[half] = static_cast<const Scalar*>(matrix.data) + group * matrix.group_stride + element;
      b_is_there_[half][0] = column < product_.columns;
      b_is_there_[half][1] = column + (kByColumns ? 64 : 0) < product_.columns;
    }
  }

  __device__ void load_a(const ProductPart& part, ptx::SharedAddress panel) const {
    const bool is_deep = depth_ + narrow_chunk() * AmpereTile::kVector < depth_of(part);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::copy_or_clear(panel + in_narrow_rows(narrow_row() + 64 * i, narrow_chunk()),
                         a_[i] + depth_, a_[i] && is_deep, part.a.data);
    }
  }

  __device__ void load_b(const ProductPart& part, const GroupedMatrix& matrix, int half,
                         ptx::SharedAddress panel) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kByColumns) {
        const bool is_deep = depth_ + narrow_chunk() * AmpereTile::kVector < depth_of(part);
        ptx::copy_or_clear(panel + in_narrow_rows(narrow_row() + 64 * i, narrow_chunk()),
                           b_[half] + 64 * i * matrix.stride + depth_,
                           is_deep && b_is_there_[half][i], matrix.data);
      } else {
        const bool is_deep = depth_ + wide_row() + 16 * i < depth_of(part);
        ptx::copy_or_clear(panel + in_wide_rows(wide_row() + 16 * i, wide_chunk()),
                           b_[half] + (depth_ + 16 * i) * matrix.stride,
                           is_deep && b_is_there_[half][i], matrix.data);
      }
    }
  }

  const FusedProduct& product_;
  Tiles tiles_;
  ptx::SharedAddress memory_;
  int slot_ = 0, part_ = 0, depth_ = 0;
  const Scalar* a_[2];  // null: zeros
  const Scalar* b_[2];
  bool b_is_there_[2][2];
};

// A warp's sums: strips of 16 rows by groups of 8 columns.
using AmpereSums = float[AmpereTile::kStrips][AmpereTile::kGroups][4];

// Loads b for 16 elements of the depth, two groups of columns at a time.
template <bool kByColumns>
__device__ inline void load_b_fragments(ptx::SharedAddress panel, int step, int first_column,
                                        uint32_t (&b)[AmpereTile::kGroups / 2][4]) {
  const int lane = lane_index();
#pragma unroll
  for (int i = 0; i < AmpereTile::kGroups / 2; ++i) {
    const int column = first_column + 16 * i;
    if constexpr (kByColumns) {
      const int row = column + lane % 8 + lane / 16 * 8;
      ptx::load_matrices(panel + in_narrow_rows(row, 2 * step + lane / 8 % 2), b[i]);
    } else {
      const int chunk = column / AmpereTile::kVector + lane / 16;
      ptx::load_transposed(panel + in_wide_rows(16 * step + lane % 16, chunk), b[i]);
    }
  }
}

template <class Scalar>
__device__ inline void multiply_fragments(const uint32_t (&a)[AmpereTile::kStrips][4],
                                          const uint32_t (&b)[AmpereTile::kGroups / 2][4],
                                          AmpereSums& sums) {
#pragma unroll
  for (int strip = 0; strip < AmpereTile::kStrips; ++strip) {
#pragma unroll
    for (int group = 0; group < AmpereTile::kGroups; ++group) {
      const uint32_t (&pair)[4] = b[group / 2];
      ptx::multiply(sums[strip][group], a[strip], pair[group % 2 * 2], pair[group % 2 * 2 + 1],
                    Scalar{});
    }
  }
}

template <class Scalar, bool kByColumns>
__device__ inline void multiply_stage(ptx::SharedAddress stage, int first_row, int first_column,
                                      AmpereSums& first, AmpereSums& second) {
  const ptx::SharedAddress panel = stage + AmpereTile::kPanelBytes;
#pragma unroll
  for (int step = 0; step < AmpereTile::kDepth / 16; ++step) {
    uint32_t a[AmpereTile::kStrips][4];
#pragma unroll
    for (int strip = 0; strip < AmpereTile::kStrips; ++strip) {
      const int row = first_row + 16 * strip + lane_index() % 16;
      ptx::load_matrices(stage + in_narrow_rows(row, 2 * step + lane_index() / 16), a[strip]);
    }
    uint32_t b[2][AmpereTile::kGroups / 2][4];
    load_b_fragments<kByColumns>(panel, step, first_column, b[0]);
    load_b_fragments<kByColumns>(panel + AmpereTile::kPanelBytes, step, first_column, b[1]);
    multiply_fragments<Scalar>(a, b[0], first);
    multiply_fragments<Scalar>(a, b[1], second);
  }
}

template <class Scalar, bool kByColumns, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_on_ampere(const __grid_constant__ FusedProduct product, Epilogue epilogue) {
  constexpr bool kSideBySide = Epilogue::kSideBySide;
  const ptx::SharedAddress memory = ptx::shared_address(ptx::shared_memory());
  AmpereLoader<Scalar, kByColumns, kSideBySide> loader(product, memory);
  for (int i = 0; i < AmpereTile::kStages - 1; ++i) loader.load();

  const int warp = warp_in_block();
  const int first_row = warp / AmpereTile::kWarpsAcross * 16 * AmpereTile::kStrips;
  const int first_column = warp % AmpereTile::kWarpsAcross * 8 * AmpereTile::kGroups;
  int slot = 0;
  TileWalk<AmpereTile::kRows> tiles(product, tiles_across<kSideBySide>(product));
  for (; !tiles.is_over(); tiles.advance()) {
    AmpereSums first = {}, second = {};
    for (int i = 0; i < product.num_parts; ++i) {
      const ProductPart& part = product.parts[i];
      for (int depth = 0; depth < depth_of(part); depth += AmpereTile::kDepth) {
        ptx::wait_for_copies<AmpereTile::kStages - 2>();
        __syncthreads();  // this stage's copies have arrived, and the previous stage was read
        loader.load();    // into the previous stage
        const ptx::SharedAddress stage = memory + slot * AmpereTile::kStageBytes;
        multiply_stage<Scalar, kByColumns>(stage, first_row, first_column, first, second);
        slot = (slot + 1) % AmpereTile::kStages;
      }
    }
    const Tile tile = tiles.tile();
#pragma unroll
    for (int i = 0; i < AmpereTile::kStrips; ++i) {
      const Strip strip{.row = tile.first_row + first_row + 16 * i + lane_index() / 4,
                        .end_row = tile.end_row,
                        .first_column = column_of<kSideBySide>(tile, 0) + first_column,
                        .second_column = column_of<kSideBySide>(tile, 1) + first_column,
                        .columns = product.columns};
      apply(epilogue, strip, first[i], second[i]);
    }
  }
  ptx::wait_for_copies<0>();
}

}  // namespace moe_parallel::fused
