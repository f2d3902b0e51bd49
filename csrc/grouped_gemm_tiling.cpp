#include "grouped_gemm_tiling.h"

#include <atomic>

namespace moe_parallel {
namespace {

std::atomic<Tiling> current{Tiling::kWhereFaster};

}  // namespace

Tiling tiling() { return current; }

Tiling set_tiling(Tiling wanted) { return current.exchange(wanted); }

}  // namespace moe_parallel
