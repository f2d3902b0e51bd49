// The tiles that a block computes. The blocks are persistent, and each computes every gridDim.x-th
// tile. The device finds the tiles from the offsets.
#pragma once

#include "../../fused_product.h"

namespace moe_parallel::fused {

constexpr int kBand = 16;  // rows of tiles that share b in the L2 cache

constexpr int kTileRows = 128, kTileColumns = 128;  // of each accumulator

// A tile of the result.
struct Tile {
  int64_t group;
  int64_t first_row;  // among the rows of all groups
  int64_t end_row;    // of the group
  int64_t column;     // the tile's place among the tiles across
};

// The column of the result at which accumulator `half` of a tile begins.
template <bool kSideBySide>
__device__ inline int64_t column_of(const Tile& tile, int half) {
  return kSideBySide ? (2 * tile.column + half) * kTileColumns : tile.column * kTileColumns;
}

template <bool kSideBySide>
__host__ __device__ inline int64_t tiles_across(const FusedProduct& product) {
  constexpr int64_t kColumns = kTileColumns * (kSideBySide ? 2 : 1);
  return (product.columns + kColumns - 1) / kColumns;
}

// The source row for row `row` of a part, or -1.
__device__ inline int64_t source_of(const GatheredRows& rows, int64_t row) {
  if (!rows.slots) return row;
  const int64_t slot = rows.slots[row];
  return slot < 0 || slot >= rows.source_rows * rows.choices ? -1 : slot / rows.choices;
}

// Iterates over the tiles of a block, each of kRows rows. There are `across` tiles side by side.
template <int kRows>
class TileWalk {
 public:
  __device__ TileWalk(const FusedProduct& product, int64_t across)
      : product_(product), across_(static_cast<int>(across)), left_(static_cast<int>(blockIdx.x)) {
    seek();
  }

  __device__ bool is_over() const { return group_ == product_.groups; }

  __device__ void advance() {
    left_ += static_cast<int>(gridDim.x);
    seek();
  }

  // Only valid if !is_over(). A group is divided into bands of kBand rows of tiles, and each band
  // is processed from left to right.
  __device__ Tile tile() const {
    const int band = left_ / (kBand * across_), in_band = left_ % (kBand * across_);
    const int down = min(kBand, tiles_down() - band * kBand);
    const int64_t row = band * kBand + in_band % down;
    return {group_, begin(group_) + row * kRows, begin(group_ + 1), in_band / down};
  }

 private:
  // Advances to the group that has the tile, and subtracts the tiles of the groups before it.
  __device__ void seek() {
    for (; group_ < product_.groups; ++group_) {
      const int tiles = tiles_down() * across_;
      if (left_ < tiles) return;
      left_ -= tiles;
    }
  }

  __device__ int64_t begin(int64_t group) const {
    return product_.offsets ? product_.offsets[group] : group * product_.rows;
  }
  __device__ int tiles_down() const {
    return static_cast<int>((begin(group_ + 1) - begin(group_) + kRows - 1) / kRows);
  }

  const FusedProduct& product_;
  int across_;
  int left_;  // tiles between the first tile of this group and the current one
  int group_ = 0;
};

}  // namespace moe_parallel::fused
