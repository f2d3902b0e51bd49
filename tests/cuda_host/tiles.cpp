// The tile that a grouped product gets on Hopper.
#include "cuda/cutlass/tiles.h"

using namespace moe_parallel;

// Returns -1 for a product that CUTLASS does not compute.
extern "C" int hopper_tile(const GroupedProduct* task) {
  const auto kind = kind_of(*task);
  return kind ? static_cast<int>(fastest_tile(*kind, *task)) : -1;
}
