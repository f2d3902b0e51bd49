#include "packed_product.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "block_product.h"
#include "cpu/cache_lines.h"
#include "cpu/capability.h"
#include "cpu/parts.h"
#include "cpu/processor.h"
#include "fused_gemm.h"
#include "launch.h"
#include "onednn_product.h"
#include "packed_weights.h"
#include "permute.h"

namespace moe_parallel {
namespace {

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

// A part of the result of one of several plans: a panel of columns, for a band of rows.
struct Part {
  size_t plan;
  int64_t first_row, rows, first_column, columns;
};

// Where the sums of a part are computed.
struct Sums {
  float* data;
  int64_t stride;
  bool adds;
};

// Rows k..k + depth of b, and the part's columns.
void pack_block(ScalarType type, const GroupedMatrix& b, int64_t k, int64_t depth, const Part& part,
                void* to) {
  const int64_t row = b.by_columns ? 1 : b.stride, column = b.by_columns ? b.stride : 1;
  const auto* corner =
      static_cast<const char*>(b.data) + (k * row + part.first_column * column) * bytes_of(type);
  const int64_t width = part.columns;
  if (b.by_columns) {
    pack_right_transposed({type, corner, b.stride, width, width, depth}, to, width);
  } else {
    pack_right({type, corner, b.stride, depth, depth, width}, to);
  }
}

// Where the block of rows k.. is among all blocks of a right factor, in numbers.
int64_t offset_of_block(const Part& part, int64_t k, int64_t depth) {
  return part.first_column * depth + k * part.columns;
}

// The sums of one accumulator.
void sum_products(const FusedProduct& product, GroupedMatrix ProductPart::* matrix,
                  const Part& part, Sums sums, void* packed) {
  const auto sizes = block_sizes(product.type);
  const int64_t bytes = bytes_of(product.type);
  for (int i = 0; i < product.num_parts; ++i) {
    const auto& a = product.parts[i].a;
    const auto& b = product.parts[i].*matrix;
    const auto* rows = static_cast<const char*>(a.data);
    const int64_t depth = product.parts[i].depth;
    for (int64_t k = 0; b.data != nullptr && k < depth; k += sizes.k) {
      const int64_t block_depth = std::min(sizes.k, depth - k);
      const void* block = packed;
      if (b.blocks != nullptr) {
        block = static_cast<const char*>(b.blocks) + offset_of_block(part, k, depth) * bytes;
      } else {
        pack_block(product.type, b, k, block_depth, part, packed);
      }
      for (int64_t m = 0; m < part.rows; m += sizes.m) {
        multiply_blocks({.type = product.type,
                         .m = std::min(sizes.m, part.rows - m),
                         .n = part.columns,
                         .k = block_depth,
                         .a = rows + ((part.first_row + m) * a.stride + k) * bytes,
                         .a_stride = a.stride,
                         .b = block,
                         .b_stride = part.columns,
                         .c = sums.data + m * sums.stride,
                         .c_stride = sums.stride,
                         .accumulate = sums.adds});
      }
      sums.adds = true;
    }
  }
}

// A product, and what becomes of its sums.
template <class Rows>
struct Plan {
  FusedProduct product;
  Rows epilogue;
  Kernel<EpiloguePart<Rows>> finish;
  bool has_second;
  Sums results;  // of fp32 that is only stored: the sums are the result. Null otherwise
};

// Products with the same left factor, type and epilogue, whose panels threads share.
template <class Rows>
using Plans = std::vector<Plan<Rows>>;

// The memory of a thread.
struct PartScratch {
  CacheLines packed;  // a block of the right factor
  CacheLines first, second;

  template <class Rows>
  PartScratch(const Plan<Rows>& plan, int64_t rows)
      : packed(block_sizes(plan.product.type).k * kPanel * bytes_of(plan.product.type)),
        first(plan.results.data ? 0 : rows * kPanel * bytes_of(ScalarType::kFloat32)),
        second(plan.has_second ? rows * kPanel * bytes_of(ScalarType::kFloat32) : 0) {}
};

template <class Rows>
void compute_part(const Plan<Rows>& plan, const Part& part, const PartScratch& scratch) {
  const auto& product = plan.product;
  if (plan.results.data) {
    auto sums = plan.results;
    sums.data += part.first_row * sums.stride + part.first_column;
    return sum_products(product, &ProductPart::first, part, sums, scratch.packed);
  }
  auto *first = reinterpret_cast<float*>(scratch.first.at(0)),
       *second = reinterpret_cast<float*>(scratch.second.at(0));
  sum_products(product, &ProductPart::first, part, {first, part.columns, false}, scratch.packed);
  if (plan.has_second) {
    sum_products(product, &ProductPart::second, part, {second, part.columns, false},
                 scratch.packed);
  }
  const EpiloguePart<Rows> sums{.type = product.type,
                                .epilogue = plan.epilogue,
                                .columns = product.columns,
                                .first_row = part.first_row,
                                .first_column = part.first_column,
                                .width = part.columns,
                                .first = first,
                                .second = plan.has_second ? second : nullptr};
  plan.finish(sums, 0, std::min(part.rows, product.rows - part.first_row));
}

// The panels of all results.
template <class Rows>
std::vector<Part> panels_of(const Plans<Rows>& plans, int64_t rows) {
  std::vector<Part> panels;
  for (size_t i = 0; i < plans.size(); ++i) {
    const int64_t columns = plans[i].product.columns;
    for (int64_t column = 0; column < columns; column += kPanel) {
      panels.push_back({i, 0, rows, column, std::min(kPanel, columns - column)});
    }
  }
  return panels;
}

// Each thread computes as many full panels as the others. What is left is divided into bands of
// rows, for each of which its panels are packed. The products have `rows` rows, perhaps more than
// the result.
template <class Rows>
void compute(const Plans<Rows>& plans, int64_t rows) {
  auto panels = panels_of(plans, rows);
  const auto is_full = [](const Part& panel) { return panel.columns == kPanel; };
  const int64_t full =
      std::stable_partition(panels.begin(), panels.end(), is_full) - panels.begin();
  const int64_t threads = at::get_num_threads(), block = block_sizes(plans[0].product.type).m;
  const int64_t band = parts_in(parts_in(rows, block), threads) * block;
  const int64_t whole = full - full % threads, left = panels.size() - whole;
  const int64_t bands = left * parts_in(rows, band);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const PartScratch scratch(plans[0], whole > 0 ? rows : std::min(band, rows));
    for (int64_t i = whole * begin / threads; i < whole * end / threads; ++i) {
      compute_part(plans[panels[i].plan], panels[i], scratch);
    }
    for (int64_t i = bands * begin / threads; i < bands * end / threads; ++i) {
      auto part = panels[whole + i % left];
      part.first_row = i / left * band;
      part.rows = std::min(band, rows - part.first_row);
      compute_part(plans[part.plan], part, scratch);
    }
    end_block_products();
  });
}

// The rows of the factors that have slots, in `memory` of its own; zeros follow them.
void gather(FusedProduct& product, int64_t rows, std::vector<CacheLines>& memory) {
  for (int i = 0; i < product.num_parts; ++i) {
    auto& part = product.parts[i];
    if (part.a.slots == nullptr) continue;
    const int64_t row_bytes = part.depth * bytes_of(product.type);
    memory.emplace_back(rows * row_bytes);
    const auto& gathered = memory.back();
    run_on_cpu(Permute{.x = part.a.data,
                       .slots = part.a.slots,
                       .y = gathered,
                       .tokens = part.a.source_rows,
                       .choices = part.a.choices,
                       .rows = product.rows,
                       .row_bytes = row_bytes,
                       .x_stride = part.a.stride * bytes_of(product.type),
                       .y_stride = row_bytes});
    std::memset(gathered.at(product.rows * row_bytes), 0, (rows - product.rows) * row_bytes);
    part.a = {gathered, nullptr, 1, rows, part.depth};
  }
}

constexpr int64_t kLeastDepth = 384;

// Whether packing pays for a result [rows, columns] of sums of `depth` numbers. The limits fit
// experts' products: docs/performance/log.md#packed-products-2026-11-28.
bool packing_pays(ScalarType type, int64_t rows, int64_t columns, int64_t depth) {
  constexpr int64_t kLeastMultiplications = int64_t{1} << 20, kMostRows = 1024;
  const auto is_in = [](int64_t value, int64_t least, int64_t most) {
    return least <= value && value <= most;
  };
  if (depth < kLeastDepth || rows * columns * depth < kLeastMultiplications) return false;
  return is_in(rows, type == ScalarType::kFloat32 ? 384 : 2, kMostRows);
}

// What sizes of products are multiples of. With AMX only whole tiles were tried. A pair of bf16
// numbers must not end in the next row.
struct Units {
  int64_t of_result, of_sums;
};
Units units_of(ScalarType type) {
  if (type != ScalarType::kBFloat16) return {1, 1};
  return has_amx() ? Units{kBlockUnit, kBlockUnit} : Units{1, 2};
}

// How many numbers a sum of the product has, or 0 where its layout or its sizes do not allow to
// pack it.
int64_t packed_depth(const FusedProduct& product, bool has_second) {
  const bool is_one_matrix = product.columns_per_matrix == product.columns;
  if (product.groups != 1 || !is_one_matrix || !packs_large_products(product.type)) return 0;
  const auto [of_result, of_sums] = units_of(product.type);
  if (product.rows % of_result != 0 || product.columns % of_result != 0) return 0;
  int64_t of_first = 0, of_second = 0;
  for (int i = 0; i < product.num_parts; ++i) {
    const auto& part = product.parts[i];
    if (part.a.stride < part.depth || part.depth % of_sums != 0) return 0;
    if (part.first.data) of_first += part.depth;
    if (has_second && part.second.data) of_second += part.depth;
  }
  // An accumulator of no product would not be written.
  if (of_first == 0 || (has_second && of_second == 0)) return 0;
  return std::max(of_first, of_second);
}

template <class Rows>
bool can_pack(const Plans<Rows>& plans) {
  int64_t columns = 0, depth = 0;
  for (const auto& plan : plans) {
    depth = packed_depth(plan.product, plan.has_second);
    if (depth == 0) return false;
    columns += plan.product.columns;
  }
  const auto& product = plans[0].product;
  return packing_pays(product.type, product.rows, columns, depth);
}

// The rows of products: rounded up, if all factors have so many rows.
int64_t rows_of_products(const FusedProduct& product) {
  const int64_t rows = rounded_rows(product.rows);
  for (int i = 0; i < product.num_parts; ++i) {
    const auto& a = product.parts[i].a;
    if (a.slots == nullptr && a.source_rows < rows) return product.rows;
  }
  return rows;
}

template <class Rows>
bool multiply_packed(Plans<Rows> plans) {
  if (!can_pack(plans)) return false;
  const auto& product = plans[0].product;
  const int64_t rows = plans[0].results.data ? product.rows : rows_of_products(product);
  std::vector<CacheLines> memory;
  for (auto& plan : plans) gather(plan.product, rows, memory);
  compute(plans, rows);
  return true;
}

template <class Rows>
bool multiply_packed(const FusedProduct& product, const Rows& epilogue,
                     Kernel<EpiloguePart<Rows>> finish, bool has_second) {
  return multiply_packed(Plans<Rows>{{product, epilogue, finish, has_second, {}}});
}

Plan<StoreRows> stored(const FusedProduct& product, const StoreRows& to) {
  Sums results{};
  if (product.type == ScalarType::kFloat32) {
    results = {static_cast<float*>(to.d), to.stride, to.accumulate};
  }
  return {product, to, kernels().store_rows, false, results};
}

bool multiply_packed(const FusedProduct& product, const StoreRows& epilogue) {
  return multiply_packed(Plans<StoreRows>{stored(product, epilogue)});
}

// SwiGLU within the product pays while the sums of a panel stay in the L2 cache.
bool has_few_rows(const FusedProduct& product) { return product.rows <= 768; }

bool multiply_packed(const FusedProduct& product, const ActivateRows& epilogue) {
  return has_few_rows(product) && multiply_packed(product, epilogue, kernels().activate_rows, true);
}
bool multiply_packed(const FusedProduct& product, const DifferentiateRows& epilogue) {
  return has_few_rows(product) &&
         multiply_packed(product, epilogue, kernels().differentiate_rows, false);
}
bool multiply_packed(const FusedProduct& product, const DifferentiateGateRows& epilogue) {
  const bool has_dh = epilogue.dh == nullptr;
  return has_dh && has_few_rows(product) &&
         multiply_packed(product, epilogue, kernels().differentiate_gate_rows, true);
}
bool multiply_packed(const FusedProduct&, const ActivateGateRows&) { return false; }
bool multiply_packed(const FusedProduct&, const SquareRows&) { return false; }

bool takes_packed_products(const at::Tensor& a) {
  const auto type = a.scalar_type();
  return a.is_cpu() && (type == at::kFloat || type == at::kBFloat16) &&
         packs_large_products(scalar_type_of("a", a));
}

}  // namespace

bool packed_product(const FusedProduct& product, const Epilogue& epilogue) {
  return std::visit([&](const auto& rows) { return multiply_packed(product, rows); }, epilogue);
}

bool packs_outer_products_of(const at::Tensor& x) {
  return takes_packed_products(x) &&
         packing_pays(scalar_type_of("x", x), x.size(1), kPanel, x.size(0));
}

bool packed_products_out(const at::Tensor& a, c10::ArrayRef<RightProduct> products) {
  if (!takes_packed_products(a) || a.stride(1) != 1) return false;
  Plans<StoreRows> plans;
  for (const auto& [out, b, accumulate, blocks] : products) {
    const bool by_rows = b.stride(1) == 1, by_columns = b.stride(0) == 1;
    if (out.scalar_type() != a.scalar_type() || out.stride(1) != 1 || out.stride(0) < out.size(1) ||
        !(by_rows || by_columns)) {
      return false;
    }
    const GroupedMatrix right{.data = b.const_data_ptr(),
                              .stride = b.stride(by_rows ? 0 : 1),
                              .group_stride = 0,
                              .by_columns = !by_rows,
                              .is_cut = false,
                              .blocks = blocks.defined() ? blocks.const_data_ptr() : nullptr};
    const FusedProduct product{.type = scalar_type_of("a", a),
                               .parts = {{rows_of(a), right, {}, a.size(1)}},
                               .num_parts = 1,
                               .offsets = nullptr,
                               .groups = 1,
                               .rows = out.size(0),
                               .columns = out.size(1),
                               .columns_per_matrix = out.size(1)};
    plans.push_back(stored(product, {out.mutable_data_ptr(), out.stride(0), accumulate}));
  }
  return multiply_packed(std::move(plans));
}

bool keeps_blocks(ScalarType type, int64_t depth, int64_t columns) {
  const auto [of_result, of_sums] = units_of(type);
  return type == ScalarType::kBFloat16 && packs_large_products(type) && depth >= kLeastDepth &&
         depth % of_sums == 0 && columns % of_result == 0;
}

void pack_right_factor(const RightFactor& factor, void* to) {
  const int64_t depth = factor.depth, k_size = block_sizes(factor.type).k;
  for (int64_t column = 0; column < factor.columns; column += kPanel) {
    const Part panel{0, 0, 0, column, std::min(kPanel, factor.columns - column)};
    for (int64_t k = 0; k < depth; k += k_size) {
      pack_block(factor.type, factor.matrix, k, std::min(k_size, depth - k), panel,
                 static_cast<char*>(to) + offset_of_block(panel, k, depth) * bytes_of(factor.type));
    }
  }
}

}  // namespace moe_parallel
