#include "packed_product.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "block_product.h"
#include "cpu/cache_lines.h"
#include "cpu/parts.h"
#include "cpu/processor.h"
#include "launch.h"
#include "onednn_product.h"
#include "packing.h"

namespace moe_parallel {
namespace {

constexpr int64_t kPanel = 128;  // columns

// How many parts of a size cover a number.
int64_t parts_in(int64_t number, int64_t size) { return (number + size - 1) / size; }

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
  std::initializer_list<Term> terms;
  void* out;
  int64_t rows, columns, stride;
  bool accumulate;

  bool rounds() const { return type == ScalarType::kBFloat16; }
  int64_t depth() const {
    int64_t depth = 0;
    for (const auto& term : terms) depth += term.a.size(1);
    return depth;
  }
};

// A part of out: a panel of columns, for a band of rows.
struct Part {
  int64_t first_row, rows, first_column, columns;
};

// The memory of a thread.
struct PartScratch {
  CacheLines packed;  // a block of the right factor
  CacheLines sums;    // of a part that is rounded

  PartScratch(const PackedSum& sum, int64_t rows)
      : packed(block_sizes(sum.type).k * kPanel * bytes_of(sum.type)),
        sums(sum.rounds() ? rows * kPanel * bytes_of(ScalarType::kFloat32) : 0) {}
};

// Rows k..k + depth of b, and the part's columns.
void pack_block(ScalarType type, const at::Tensor& b, int64_t k, int64_t depth, const Part& part,
                void* to) {
  const auto* corner = static_cast<const char*>(b.const_data_ptr()) +
                       (k * b.stride(0) + part.first_column * b.stride(1)) * bytes_of(type);
  const int64_t width = part.columns;
  if (b.stride(1) == 1) {
    pack_right({type, corner, b.stride(0), depth, depth, width}, to);
  } else {
    pack_right_transposed({type, corner, b.stride(1), width, width, depth}, to, width);
  }
}

void compute_part(const PackedSum& sum, const Part& part, const PartScratch& scratch) {
  const auto sizes = block_sizes(sum.type);
  const int64_t bytes = bytes_of(sum.type);
  char* out =
      static_cast<char*>(sum.out) + (part.first_row * sum.stride + part.first_column) * bytes;
  auto* sums = reinterpret_cast<float*>(sum.rounds() ? scratch.sums.at(0) : out);
  const int64_t stride = sum.rounds() ? part.columns : sum.stride;
  bool adds = sum.accumulate && !sum.rounds();
  for (const auto& [a, b] : sum.terms) {
    const auto* rows = static_cast<const char*>(a.const_data_ptr());
    for (int64_t k = 0; k < a.size(1); k += sizes.k) {
      const int64_t depth = std::min(sizes.k, a.size(1) - k);
      pack_block(sum.type, b, k, depth, part, scratch.packed);
      for (int64_t m = 0; m < part.rows; m += sizes.m) {
        multiply_blocks({.type = sum.type,
                         .m = std::min(sizes.m, part.rows - m),
                         .n = part.columns,
                         .k = depth,
                         .a = rows + ((part.first_row + m) * a.stride(0) + k) * bytes,
                         .a_stride = a.stride(0),
                         .b = scratch.packed,
                         .b_stride = part.columns,
                         .c = sums + m * stride,
                         .c_stride = stride,
                         .accumulate = adds});
      }
      adds = true;
    }
  }
  if (!sum.rounds()) return;
  round_rows({.sums = sums,
              .out = out,
              .rows = part.rows,
              .width = part.columns,
              .out_stride = sum.stride,
              .adds = sum.accumulate});
}

// Whether packing pays for a result [rows, columns] of sums of `depth` numbers. The limits fit
// experts' products: docs/performance/log.md#packed-products-2026-11-28.
bool packing_pays(ScalarType type, int64_t rows, int64_t columns, int64_t depth) {
  constexpr int64_t kLeastMultiplications = int64_t{1} << 20, kLeastDepth = 384, kMostRows = 1024;
  const auto is_in = [](int64_t value, int64_t least, int64_t most) {
    return least <= value && value <= most;
  };
  if (depth < kLeastDepth || rows * columns * depth < kLeastMultiplications) return false;
  return is_in(rows, type == ScalarType::kFloat32 ? 384 : 64, kMostRows);
}

bool fits_blocks(const PackedSum& sum) {
  // A pair of bf16 numbers must not end in the next row. With AMX only whole tiles were tried.
  const bool has_tiles = sum.rounds() && has_amx();
  const int64_t unit = has_tiles ? kBlockUnit : sum.rounds() ? 2 : 1;
  if (has_tiles && (sum.rows % unit != 0 || sum.columns % unit != 0)) return false;
  for (const auto& [a, b] : sum.terms) {
    const bool has_rows = a.stride(1) == 1 && a.stride(0) >= a.size(1);
    if (!has_rows || a.size(1) % unit != 0) return false;
    if (b.stride(0) != 1 && b.stride(1) != 1) return false;
  }
  return sum.stride >= sum.columns;
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
  if (!takes_packed_products(a) || out.scalar_type() != a.scalar_type() || out.stride(1) != 1) {
    return false;
  }
  const auto type = scalar_type_of("a", a);
  const int64_t rows = out.size(0), columns = out.size(1);
  const PackedSum sum{.type = type,
                      .terms = terms,
                      .out = out.mutable_data_ptr(),
                      .rows = rows,
                      .columns = columns,
                      .stride = out.stride(0),
                      .accumulate = accumulate};
  if (!fits_blocks(sum) || !packing_pays(type, rows, columns, sum.depth())) return false;

  // Where panels are too few for all threads, each is packed for several bands of rows.
  const int64_t panels = parts_in(columns, kPanel), blocks = parts_in(rows, block_sizes(type).m);
  const int64_t bands = std::min(blocks, parts_in(at::get_num_threads(), panels));
  const int64_t band = parts_in(blocks, bands) * block_sizes(type).m;
  at::parallel_for(0, panels * parts_in(rows, band), 1, [&](int64_t begin, int64_t end) {
    const PartScratch scratch(sum, std::min(band, rows));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / panels * band, column = i % panels * kPanel;
      compute_part(sum,
                   {row, std::min(band, rows - row), column, std::min(kPanel, columns - column)},
                   scratch);
    }
    end_block_products();
  });
  return true;
}

}  // namespace moe_parallel
