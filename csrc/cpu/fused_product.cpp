#include "../fused_product.h"

namespace moe_parallel {

bool run_on_cpu(const FusedProduct&, const StoreRows&) { return false; }
bool run_on_cpu(const FusedProduct&, const ActivateRows&) { return false; }
bool run_on_cpu(const FusedProduct&, const SquareRows&) { return false; }
bool run_on_cpu(const FusedProduct&, const DifferentiateRows&) { return false; }

}  // namespace moe_parallel
