#include <string_view>
#include <variant>

#include "build_config.h"
#include "can_fuse.h"
#include "launch.cuh"

namespace moe_parallel::fused {

int attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

bool runs_hopper() {
  constexpr bool kIsBuilt =
      std::string_view(MOE_PARALLEL_CUDA_ARCHITECTURES).find("9.0a") != std::string_view::npos;
  return kIsBuilt && attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

namespace {

constexpr int64_t kMost = int64_t{1} << 30;  // of values that are counted in 32 bits

bool has_device() {
  return attribute(cudaDevAttrComputeCapabilityMajor) >= 8 &&
         attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= AmpereTile::kSharedBytes;
}

bool takes_matrix(const GroupedMatrix& matrix, Layout layout) {
  const bool fits = layout == Layout::kAny || matrix.by_columns == (layout == Layout::kByColumns);
  return fits && matrix.data && !matrix.is_cut &&
         takes_rows({matrix.data}, {matrix.stride, matrix.group_stride});
}

}  // namespace

bool takes_rows(std::initializer_list<const void*> addresses,
                std::initializer_list<int64_t> strides) {
  return are_aligned(addresses, strides, sizeof(__half));
}

bool lies_by_columns(const FusedProduct& product) { return product.parts[0].first.by_columns; }

bool takes(const FusedProduct& product, Layout layout, Accumulators accumulators) {
  if (product.type != ScalarType::kBFloat16 && product.type != ScalarType::kFloat16) return false;
  if (product.rows == 0 || product.columns == 0 || !has_device()) return false;
  if (layout == Layout::kAny) {
    layout = lies_by_columns(product) ? Layout::kByColumns : Layout::kByRows;
  }
  const int64_t down = product.rows / kTileRows + product.groups + 1;
  if (down > kMost || product.columns > kMost ||
      down * (product.columns / kTileColumns + 1) > kMost) {
    return false;
  }
  const bool is_one_matrix = product.columns_per_matrix == product.columns;
  bool taken = takes_rows({}, {product.columns, product.columns_per_matrix}) &&
               (is_one_matrix || layout == Layout::kByRows);
  for (int i = 0; i < product.num_parts; ++i) {
    const ProductPart& part = product.parts[i];
    // A copy that reads nothing is given the address of the first row (ptx::copy_or_clear), so
    // there must be one.
    taken = taken && part.a.source_rows > 0 && 0 < part.depth && part.depth < kMost &&
            takes_rows({part.a.data}, {part.a.stride, part.depth}) &&
            takes_matrix(part.first, layout) &&
            (accumulators == Accumulators::kFirst ? !part.second.data
                                                  : takes_matrix(part.second, layout));
  }
  return taken;
}

bool takes_gate(const FusedProduct& product) {
  return product.num_parts == 1 && product.columns_per_matrix == product.columns &&
         takes(product, Layout::kByRows, Accumulators::kFirst);
}

}  // namespace moe_parallel::fused

namespace moe_parallel {

// Measured on Hopper: the norms of norm_topk took 0.75 and 0.89 of the time on an H200. With every
// kernel fused, the routed layer took 0.94 and 1.06 of the time on an H100 (n=64, n=8). SwiGLU of a
// gate was measured there as a program of its own: at depth 64 it took 0.65 of the time of both
// steps, and its gradients 0.83; at depth 256 1.00 to 1.07, and 0.96. It is off until its tests
// have run on a GPU (docs/performance/log.md).
bool is_faster_fused(const Epilogue& epilogue) {
  return std::holds_alternative<SquareRows>(epilogue) && fused::runs_hopper();
}

}  // namespace moe_parallel
