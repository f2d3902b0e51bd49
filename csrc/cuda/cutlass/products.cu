#include <climits>

#include "../../alignment.h"
#include "build_config.h"  // written by setup.py
#include "group_arguments.cuh"
#include "instantiations.h"
#include "products.h"
#include "tiles.h"

namespace moe_parallel {
namespace {

bool fits_int(int64_t size) { return size <= INT_MAX; }

// Whether rows, or columns, of `dense` elements can be read 16 bytes at a time.
bool is_aligned(const GroupedMatrix& matrix, ScalarType type, int64_t dense) {
  const int64_t between_groups = matrix.is_cut ? 0 : matrix.group_stride;
  return dense != kRagged &&
         are_aligned({matrix.data}, {dense, matrix.stride, between_groups}, size_of(type));
}

bool has_aligned_matrices(const GroupedProduct& task) {
  return is_aligned(task.a, task.type, task.a.by_columns ? task.m : task.k) &&
         is_aligned(task.b, task.type, task.b.by_columns ? task.k : task.n) &&
         is_aligned(task.d, task.out_type, task.n);
}

const Instantiation& on_ampere(const Instantiations& of_type, ProductKind kind) {
  switch (kind) {
    case ProductKind::kProduct:
      return of_type.product;
    case ProductKind::kByTransposed:
      return of_type.by_transposed;
    case ProductKind::kOuter:
      return of_type.outer;
    case ProductKind::kOuterInFloat:
      break;
  }
  return of_type.outer_in_float;
}

#if MOE_PARALLEL_BUILT_FOR_HOPPER
const Instantiation& on_hopper(ProductKind kind, Tile tile) {
  const HopperTiles& tiles = kind == ProductKind::kProduct        ? kHopperProduct
                             : kind == ProductKind::kByTransposed ? kHopperByTransposed
                             : kind == ProductKind::kOuter        ? kHopperOuter
                                                                  : kHopperOuterInFloat;
  return tile == Tile::kWide ? tiles.wide : tile == Tile::kNarrow ? tiles.narrow : tiles.square;
}
#endif

// A type without an instantiation for Hopper uses the kernels for Ampere there.
const Instantiation* find(const GroupedProduct& task, const Device& device) {
  const auto kind = kind_of(task);
  if (!device.runs_ampere || !kind) return nullptr;
  switch (task.type) {
    case ScalarType::kBFloat16:
#if MOE_PARALLEL_BUILT_FOR_HOPPER
      if (device.runs_hopper) return &on_hopper(*kind, fastest_tile(*kind, task));
#endif
      return &on_ampere(kAmpereBFloat16, *kind);
    case ScalarType::kFloat16:
      return &on_ampere(kAmpereFloat16, *kind);
    case ScalarType::kFloat32:
      return &on_ampere(kAmpereTf32, *kind);
    case ScalarType::kFloat64:
      return nullptr;
  }
  return nullptr;
}

}  // namespace

bool cutlass_takes(const GroupedProduct& task, const Device& device, bool tf32) {
  if (task.type == ScalarType::kFloat32 && !tf32) return false;
  if (task.rows == 0 || task.m == 0 || task.n == 0 || task.k == 0) return false;
  return fits_int(task.groups) && fits_int(task.rows) && fits_int(task.m) && fits_int(task.n) &&
         fits_int(task.k) && has_aligned_matrices(task) && find(task, device) != nullptr;
}

int64_t cutlass_workspace(const GroupedProduct& task, const Device& device) {
  return find(task, device)->workspace(task, device);
}

const char* run_on_cutlass(const GroupedProduct& task, const Device& device, void* workspace,
                           cudaStream_t stream) {
  return find(task, device)->run(task, device, workspace, stream);
}

}  // namespace moe_parallel
