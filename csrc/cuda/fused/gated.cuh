// Grouped products whose sums are the gate of SwiGLU, such as AoE's G = C W_up. The gate is not
// written: the epilogue reads the other inputs of SwiGLU, and writes what follows from all of them.
//
// At a low depth most of the time goes into these reads and writes. So a tile is small enough for
// two blocks on a multiprocessor, and its reads begin before its products. cp.async gathers rows
// two stages ahead, and mma multiplies. The blocks are persistent, as in ampere.cuh.
#pragma once

#include "ptx.cuh"
#include "strip.cuh"
#include "tiles.cuh"

namespace moe_parallel::fused {

// The elements have 16 bits. There are eight warps, two down and four across. Each has 32 rows and
// 32 columns, which makes 32 sums per thread.
struct GatedTile {
  static constexpr int kRows = 64, kColumns = kTileColumns;
  static constexpr int kDepth = 64;  // elements of a row, 128 bytes
  static constexpr int kStages = 3;
  static constexpr int kBlocks = 2;  // of a multiprocessor
  static constexpr int kWarpsAcross = 4;
  static constexpr int kStrips = kRows / (kWarpsPerBlock / kWarpsAcross) / 16;
  static constexpr int kGroups = kColumns / kWarpsAcross / 8;
  static constexpr int kChunks = 2 * kGroups / 4;                          // of a strip
  static constexpr int kVector = 8;                                        // elements in 16 bytes
  static constexpr int kRowBytes = 2 * kDepth, kLineBytes = 2 * kColumns;  // of a, and of b
  static constexpr int kPanelBytes = kRows * kRowBytes;                    // of a in one stage
  static constexpr int kStageBytes = kPanelBytes + kDepth * kLineBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

using GatedWalk = TileWalk<GatedTile::kRows>;

// The place of a chunk of 16 bytes in a panel. The chunks are swizzled, so that the eight rows that
// ldmatrix reads at once are in different banks.
template <int kBytes>
__device__ inline ptx::SharedAddress in_panel(int row, int chunk) {
  return row * kBytes + ((chunk ^ (row & 7)) << 4);
}

// Loads the stages of a block's tiles one after the other.
template <class Scalar>
class GatedLoader {
  static constexpr int kChunksOfRow = GatedTile::kRowBytes / 16;
  static constexpr int kChunksOfLine = GatedTile::kLineBytes / 16;
  static constexpr int kRowsApart = kThreads / kChunksOfRow;  // between two rows of a thread
  static constexpr int kLinesApart = kThreads / kChunksOfLine;
  static constexpr int kRowsOfThread = GatedTile::kRows / kRowsApart;

 public:
  __device__ GatedLoader(const FusedProduct& product, ptx::SharedAddress memory)
      : part_(product.parts[0]),
        columns_(product.columns),
        tiles_(product, tiles_across<false>(product)),
        memory_(memory) {
    locate();
  }

  // Loads the next stage as one group of copies. After the last stage the group is empty.
  __device__ void load() {
    if (!tiles_.is_over()) {
      const ptx::SharedAddress stage = memory_ + slot_ * GatedTile::kStageBytes;
      load_rows(stage);
      load_lines(stage + GatedTile::kPanelBytes);
      depth_ += GatedTile::kDepth;
      if (depth_ >= part_.depth) {
        depth_ = 0;
        tiles_.advance();
        locate();
      }
    }
    ptx::commit_copies();
    slot_ = (slot_ + 1) % GatedTile::kStages;
  }

 private:
  static __device__ int row() { return static_cast<int>(threadIdx.x) / kChunksOfRow; }
  static __device__ int chunk_of_row() { return static_cast<int>(threadIdx.x) % kChunksOfRow; }
  static __device__ int line() { return static_cast<int>(threadIdx.x) / kChunksOfLine; }
  static __device__ int chunk_of_line() { return static_cast<int>(threadIdx.x) % kChunksOfLine; }

  // Computes the addresses that this thread reads for a tile, at depth 0.
  __device__ void locate() {
    if (tiles_.is_over()) return;
    const Tile tile = tiles_.tile();
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int64_t row_of_all = tile.first_row + row() + kRowsApart * i;
      const int64_t source = row_of_all < tile.end_row ? source_of(part_.a, row_of_all) : -1;
      rows_[i] = source < 0 ? nullptr
                            : static_cast<const Scalar*>(part_.a.data) + source * part_.a.stride +
                                  chunk_of_row() * GatedTile::kVector;
    }
    const int64_t column = column_of<false>(tile, 0) + chunk_of_line() * GatedTile::kVector;
    has_column_ = column < columns_;
    lines_ = static_cast<const Scalar*>(part_.first.data) + tile.group * part_.first.group_stride +
             line() * part_.first.stride + column;
  }

  __device__ void load_rows(ptx::SharedAddress panel) const {
    const bool is_deep = depth_ + chunk_of_row() * GatedTile::kVector < part_.depth;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int to = row() + kRowsApart * i;
      ptx::copy_or_clear(panel + in_panel<GatedTile::kRowBytes>(to, chunk_of_row()),
                         rows_[i] + depth_, rows_[i] && is_deep, part_.a.data);
    }
  }

  __device__ void load_lines(ptx::SharedAddress panel) const {
#pragma unroll
    for (int i = 0; i < GatedTile::kDepth / kLinesApart; ++i) {
      const int to = line() + kLinesApart * i;
      ptx::copy_or_clear(panel + in_panel<GatedTile::kLineBytes>(to, chunk_of_line()),
                         lines_ + (depth_ + kLinesApart * i) * part_.first.stride,
                         has_column_ && depth_ + to < part_.depth, part_.first.data);
    }
  }

  const ProductPart& part_;
  int64_t columns_;
  GatedWalk tiles_;
  ptx::SharedAddress memory_;
  int slot_ = 0, depth_ = 0;
  const Scalar* rows_[kRowsOfThread];  // null: zeros
  const Scalar* lines_;
  bool has_column_;
};

// A warp's sums: strips of 16 rows by groups of 8 columns.
using GatedSums = float[GatedTile::kStrips][GatedTile::kGroups][4];

template <class Scalar>
__device__ inline void multiply_gated_stage(ptx::SharedAddress stage, int first_row,
                                            int first_column, GatedSums& sums) {
  const ptx::SharedAddress lines = stage + GatedTile::kPanelBytes;
  const int lane = lane_index();
#pragma unroll
  for (int step = 0; step < GatedTile::kDepth / 16; ++step) {
    uint32_t a[GatedTile::kStrips][4], b[GatedTile::kGroups / 2][4];
#pragma unroll
    for (int i = 0; i < GatedTile::kStrips; ++i) {
      const int row = first_row + 16 * i + lane % 16;
      ptx::load_matrices(stage + in_panel<GatedTile::kRowBytes>(row, 2 * step + lane / 16), a[i]);
    }
#pragma unroll
    for (int i = 0; i < GatedTile::kGroups / 2; ++i) {
      const int chunk = (first_column + 16 * i) / GatedTile::kVector + lane / 16;
      ptx::load_transposed(lines + in_panel<GatedTile::kLineBytes>(16 * step + lane % 16, chunk),
                           b[i]);
    }
#pragma unroll
    for (int strip = 0; strip < GatedTile::kStrips; ++strip) {
#pragma unroll
      for (int group = 0; group < GatedTile::kGroups; ++group) {
        const uint32_t (&pair)[4] = b[group / 2];
        ptx::multiply(sums[strip][group], a[strip], pair[group % 2 * 2], pair[group % 2 * 2 + 1],
                      Scalar{});
      }
    }
  }
}

// An epilogue has inputs. `fetch` reads those of a chunk, before the products; the call gets them
// with the sums.
template <class Epilogue>
using GatedInputs = uint4[GatedTile::kStrips][GatedTile::kChunks][Epilogue::kInputs];

// Calls body(chunk, its number) for all chunks of a strip.
template <class Body>
__device__ inline void for_each_gated_chunk(const Strip& strip, const Body& body) {
  for_each_chunk<GatedTile::kGroups>(strip, strip.first_column, [&](const Chunk& chunk) {
    body(chunk, 2 * (chunk.group / 4) + chunk.half);
  });
}

template <class Scalar, class Epilogue>
__global__ void __launch_bounds__(kThreads, GatedTile::kBlocks)
    multiply_gated(const __grid_constant__ FusedProduct product, Epilogue epilogue) {
  const ptx::SharedAddress memory = ptx::shared_address(ptx::shared_memory());
  GatedLoader<Scalar> loader(product, memory);
  for (int i = 0; i < GatedTile::kStages - 1; ++i) loader.load();

  const int warp = warp_in_block();
  const int first_row = warp / GatedTile::kWarpsAcross * 16 * GatedTile::kStrips;
  const int first_column = warp % GatedTile::kWarpsAcross * 8 * GatedTile::kGroups;
  int slot = 0;
  GatedWalk tiles(product, tiles_across<false>(product));
  for (; !tiles.is_over(); tiles.advance()) {
    const Tile tile = tiles.tile();
    const auto strip_of = [&](int i) {
      return Strip{.row = tile.first_row + first_row + 16 * i + lane_index() / 4,
                   .end_row = tile.end_row,
                   .first_column = column_of<false>(tile, 0) + first_column,
                   .second_column = 0,
                   .columns = product.columns};
    };
    GatedInputs<Epilogue> inputs;
#pragma unroll
    for (int i = 0; i < GatedTile::kStrips; ++i) {
      for_each_gated_chunk(strip_of(i), [&](const Chunk& chunk, int number) {
        epilogue.fetch(chunk, product.columns, inputs[i][number]);
      });
    }
    GatedSums sums = {};
    for (int64_t depth = 0; depth < product.parts[0].depth; depth += GatedTile::kDepth) {
      ptx::wait_for_copies<GatedTile::kStages - 2>();
      __syncthreads();  // this stage's copies have arrived, and the previous stage was read
      loader.load();    // into the previous stage
      multiply_gated_stage<Scalar>(memory + slot * GatedTile::kStageBytes, first_row, first_column,
                                   sums);
      slot = (slot + 1) % GatedTile::kStages;
    }
#pragma unroll
    for (int i = 0; i < GatedTile::kStrips; ++i) {
      for_each_gated_chunk(strip_of(i), [&](const Chunk& chunk, int number) {
        epilogue(chunk, product.columns, sums[i], inputs[i][number]);
      });
    }
  }
  ptx::wait_for_copies<0>();
}

}  // namespace moe_parallel::fused
