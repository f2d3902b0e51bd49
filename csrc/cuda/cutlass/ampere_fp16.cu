#include "ampere.cuh"

namespace moe_parallel {

extern const Instantiations kAmpereFloat16 = ampere_instantiations<cutlass::half_t>();

}  // namespace moe_parallel
