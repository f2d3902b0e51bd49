// The rules by which a grouped product on Hopper gets its tile. Torch-free, and without CUDA.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "../../grouped_gemm_product.h"

namespace moe_parallel {

// kSquare: 128 x 128, clusters of two, ping-pong. kWide: 128 x 256, clusters of two, cooperative.
// kNarrow: 128 x 64, no clusters, ping-pong. Each is 64 deep.
enum class Tile { kSquare, kWide, kNarrow };

// a b, by the layouts of a and b: row-major and row-major (x w), row-major and column-major
// (x w^T), column-major and row-major (x^T y), and the last with a float result.
enum class ProductKind { kProduct, kByTransposed, kOuter, kOuterInFloat };

// Returns nullopt for a product that CUTLASS's kernels do not compute.
inline std::optional<ProductKind> kind_of(const GroupedProduct& task) {
  const bool in_float = task.out_type != task.type;
  if (task.a.by_columns && task.b.by_columns) return std::nullopt;
  if (task.a.by_columns) return in_float ? ProductKind::kOuterInFloat : ProductKind::kOuter;
  if (in_float) return std::nullopt;
  return task.b.by_columns ? ProductKind::kByTransposed : ProductKind::kProduct;
}

struct SizeRange {
  int64_t least = 0, most = std::numeric_limits<int64_t>::max();

  constexpr bool has(int64_t size) const { return least <= size && size <= most; }
};

// `m`, `n` and `k` are the sizes in one group. A ragged size counts as the mean over the groups.
struct TileRule {
  ProductKind kind;
  SizeRange m, n, k;
  Tile tile;
};

constexpr int64_t kLeastWide = 256;  // columns, those of a wide tile

// The first rule that fits holds; without one the tile is square. They are read off the times on an
// H200 (docs/performance/log.md). Time of the square tile divided by that of the chosen one, as the
// geometric mean (and the least) of the measured products that a rule is for: few columns 1.08
// (0.99), a low depth 1.09 (0.97), 64 columns 1.09 (1.07), outer products of a low rank 1.27
// (1.08), tall ones 1.06 (0.99).
inline constexpr SizeRange kAnySize, kLow{0, 128}, kFewColumns{kLeastWide, 768};
inline constexpr TileRule kFastestTiles[] = {
    {ProductKind::kProduct, kAnySize, kFewColumns, kAnySize, Tile::kWide},
    {ProductKind::kByTransposed, kAnySize, kFewColumns, kAnySize, Tile::kWide},
    {ProductKind::kProduct, kAnySize, {kLeastWide}, {0, 256}, Tile::kWide},
    {ProductKind::kByTransposed, kAnySize, {kLeastWide}, {0, 256}, Tile::kWide},
    {ProductKind::kProduct, kAnySize, {0, 64}, kAnySize, Tile::kNarrow},
    {ProductKind::kByTransposed, kAnySize, {0, 64}, kAnySize, Tile::kNarrow},
    {ProductKind::kOuter, kLow, kAnySize, kAnySize, Tile::kNarrow},
    {ProductKind::kOuter, kAnySize, kLow, kAnySize, Tile::kNarrow},
    {ProductKind::kOuterInFloat, kLow, kAnySize, kAnySize, Tile::kNarrow},
    {ProductKind::kOuterInFloat, kAnySize, kLow, kAnySize, Tile::kNarrow},
    {ProductKind::kOuter, {3072}, {kLeastWide, 1024}, kAnySize, Tile::kWide},
};

// The tile of a product in bf16 on Hopper.
inline Tile fastest_tile(ProductKind kind, const GroupedProduct& task) {
  const int64_t mean = task.groups > 0 ? task.rows / task.groups : 0;
  const auto size = [&](int64_t wanted) { return wanted == kRagged ? mean : wanted; };
  for (const TileRule& rule : kFastestTiles) {
    if (rule.kind == kind && rule.m.has(size(task.m)) && rule.n.has(size(task.n)) &&
        rule.k.has(size(task.k))) {
      return rule.tile;
    }
  }
  return Tile::kSquare;
}

}  // namespace moe_parallel
