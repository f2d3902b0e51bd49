#include "ampere.cuh"

namespace moe_parallel {

extern const Instantiations kAmpereBFloat16 = ampere_instantiations<cutlass::bfloat16_t>();

}  // namespace moe_parallel
