// Which tiles a block computes: the blocks stay, and each takes every so manieth tile, found by the
// offsets on the device.
#pragma once

#include "../../fused_product.h"

namespace moe_parallel::fused {

constexpr int kBand = 16;  // tiles of rows that take turns, so that they find b in the L2 cache

constexpr int kTileRows = 128, kTileColumns = 128;  // of each accumulator

// A tile of the result.
struct Tile {
  int64_t group;
  int64_t first_row;  // among the rows of all groups
  int64_t end_row;    // of the group
  int64_t column;     // the tile's place among the tiles across
};

// The columns of the result where a tile's accumulator `half` begins.
template <bool kSideBySide>
__device__ inline int64_t column_of(const Tile& tile, int half) {
  return kSideBySide ? (2 * tile.column + half) * kTileColumns : tile.column * kTileColumns;
}

template <bool kSideBySide>
__host__ __device__ inline int64_t tiles_across(const FusedProduct& product) {
  constexpr int64_t kColumns = kTileColumns * (kSideBySide ? 2 : 1);
  return (product.columns + kColumns - 1) / kColumns;
}

// Where row `row` of a part is read, or -1.
__device__ inline int64_t source_of(const GatheredRows& rows, int64_t row) {
  if (!rows.slots) return row;
  const int64_t slot = rows.slots[row];
  return slot < 0 || slot >= rows.source_rows * rows.choices ? -1 : slot / rows.choices;
}

// Goes through a block's tiles, each of kRows rows; `across` tiles side by side.
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

  // Where it is not over. Within a group bands of rows go from left to right.
  __device__ Tile tile() const {
    const int band = left_ / (kBand * across_), in_band = left_ % (kBand * across_);
    const int down = min(kBand, tiles_down() - band * kBand);
    const int64_t row = band * kBand + in_band % down;
    return {group_, begin(group_) + row * kRows, begin(group_ + 1), in_band / down};
  }

 private:
  // Tiles that are left to the group's first: on to the group that they end in.
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
  int left_;  // tiles of this group, and of those behind it, before the one it is at
  int group_ = 0;
};

}  // namespace moe_parallel::fused
