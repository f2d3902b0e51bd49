#include "ampere.cuh"

namespace moe_parallel {

extern const Instantiations kAmpereTf32 = ampere_instantiations<float>();

}  // namespace moe_parallel
