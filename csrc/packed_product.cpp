#include "packed_product.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "block_product.h"
#include "cpu/parts.h"
#include "cpu/processor.h"
#include "launch.h"
#include "onednn_product.h"
#include "packing.h"

namespace moe_parallel {
namespace {

constexpr int64_t kPanel = 128;  // columns

// Rows of the left factor, and numbers that are summed, of a block. A block and the part of the
// panel that it is multiplied by fit the L2 cache together.
struct BlockSizes {
  int64_t m, k;
};
BlockSizes block_sizes(ScalarType type) {
  return type == ScalarType::kBFloat16 ? BlockSizes{128, 768} : BlockSizes{64, 384};
}

struct PackedSum {
  ScalarType type;
  const at::Tensor& out;
  std::initializer_list<Term> terms;
  bool accumulate;

  bool rounds() const { return type == ScalarType::kBFloat16; }
  int64_t depth() const {
    int64_t depth = 0;
    for (const auto& term : terms) depth += term.a.size(1);
    return depth;
  }
};

// Some columns of out.
struct Panel {
  int64_t first, columns;
};

// The memory of a thread.
struct PanelScratch {
  std::vector<char> packed;  // a block of the right factor
  std::vector<float> sums;   // of a panel that is rounded

  explicit PanelScratch(const PackedSum& sum)
      : packed(block_sizes(sum.type).k * kPanel * bytes_of(sum.type)),
        sums(sum.rounds() ? sum.out.size(0) * kPanel : 0) {}
};

// Rows k..k + depth of b, and the panel's columns.
void pack_block(ScalarType type, const at::Tensor& b, int64_t k, int64_t depth, const Panel& panel,
                void* to) {
  const auto* corner = static_cast<const char*>(b.const_data_ptr()) +
                       (k * b.stride(0) + panel.first * b.stride(1)) * bytes_of(type);
  const int64_t width = panel.columns;
  if (b.stride(1) == 1) {
    pack_right({type, corner, b.stride(0), depth, depth, width}, to);
  } else {
    pack_right_transposed({type, corner, b.stride(1), width, width, depth}, to, width);
  }
}

void round_panel(const PackedSum& sum, const Panel& panel, const PanelScratch& scratch) {
  round_rows({.sums = scratch.sums.data(),
              .out = static_cast<uint16_t*>(sum.out.mutable_data_ptr()) + panel.first,
              .rows = sum.out.size(0),
              .width = panel.columns,
              .out_stride = sum.out.stride(0),
              .adds = sum.accumulate});
}

void compute_panel(const PackedSum& sum, const Panel& panel, PanelScratch& scratch) {
  const auto sizes = block_sizes(sum.type);
  const int64_t rows = sum.out.size(0);
  float* c = sum.rounds() ? scratch.sums.data() : sum.out.mutable_data_ptr<float>() + panel.first;
  const int64_t c_stride = sum.rounds() ? panel.columns : sum.out.stride(0);
  bool adds = sum.accumulate && !sum.rounds();
  for (const auto& [a, b] : sum.terms) {
    for (int64_t k = 0; k < a.size(1); k += sizes.k) {
      const int64_t depth = std::min(sizes.k, a.size(1) - k);
      pack_block(sum.type, b, k, depth, panel, scratch.packed.data());
      for (int64_t m = 0; m < rows; m += sizes.m) {
        const auto* block = static_cast<const char*>(a.const_data_ptr()) +
                            (m * a.stride(0) + k) * bytes_of(sum.type);
        multiply_blocks({.type = sum.type,
                         .m = std::min(sizes.m, rows - m),
                         .n = panel.columns,
                         .k = depth,
                         .a = block,
                         .a_stride = a.stride(0),
                         .b = scratch.packed.data(),
                         .b_stride = panel.columns,
                         .c = c + m * c_stride,
                         .c_stride = c_stride,
                         .accumulate = adds});
      }
      adds = true;
    }
  }
  if (sum.rounds()) round_panel(sum, panel, scratch);
}

// Whether packing pays for this out of sums of `depth` numbers, which are the sizes of experts'
// products: docs/performance/log.md#packed-products-2026-11-28.
bool packing_pays(ScalarType type, int64_t rows, int64_t columns, int64_t depth) {
  constexpr int64_t kLeastProducts = int64_t{1} << 20, kLeastDepth = 384, kMostRows = 1024;
  const auto is_in = [](int64_t value, int64_t least, int64_t most) {
    return least <= value && value <= most;
  };
  if (depth < kLeastDepth || rows * columns * depth < kLeastProducts) return false;
  if (type == ScalarType::kFloat32) return is_in(rows, 384, kMostRows);
  return has_amx() ? is_in(rows, 64, 256) && depth <= 1024 : is_in(rows, 64, kMostRows);
}

bool has_dense_factors(const PackedSum& sum) {
  // A pair of bf16 numbers, and with AMX a tile, must not end in the next row.
  const int64_t unit = !sum.rounds() ? 1 : has_amx() ? kBlockUnit : 2;
  for (const auto& [a, b] : sum.terms) {
    if (a.stride(1) != 1 || (b.stride(0) != 1 && b.stride(1) != 1)) return false;
    if (a.size(1) % unit != 0) return false;
  }
  return sum.out.stride(1) == 1;
}

bool takes_packed_products(const at::Tensor& a) {
  const auto type = a.scalar_type();
  return a.is_cpu() && (type == at::kFloat || type == at::kBFloat16) &&
         packs_large_products(scalar_type_of("a", a));
}

}  // namespace

bool packs_outer_products_of(const at::Tensor& x) {
  return takes_packed_products(x) &&
         packing_pays(scalar_type_of("x", x), x.size(1), kPanel, x.size(0));
}

bool packed_product_out(const at::Tensor& out, std::initializer_list<Term> terms, bool accumulate) {
  const auto& a = terms.begin()->a;
  if (!takes_packed_products(a) || out.scalar_type() != a.scalar_type()) return false;
  const PackedSum sum{scalar_type_of("a", a), out, terms, accumulate};
  const int64_t columns = out.size(1);
  if (!has_dense_factors(sum)) return false;
  if (!packing_pays(sum.type, out.size(0), columns, sum.depth())) return false;
  at::parallel_for(0, (columns + kPanel - 1) / kPanel, 1, [&](int64_t begin, int64_t end) {
    PanelScratch scratch(sum);
    for (int64_t first = begin * kPanel; first < std::min(columns, end * kPanel); first += kPanel) {
      compute_panel(sum, {first, std::min(kPanel, columns - first)}, scratch);
    }
    end_block_products();
  });
  return true;
}

}  // namespace moe_parallel
