#include "can_fuse.h"
#include "differentiate_gate.cuh"
#include "launch.cuh"

namespace moe_parallel {

bool can_fuse(const FusedProduct& product, const DifferentiateGateRows& epilogue) {
  return epilogue.dh && fused::takes_gate(product) &&
         fused::takes_rows({epilogue.dh, epilogue.up, epilogue.dgate, epilogue.dup, epilogue.h},
                           {});
}

void run_on_cuda(const FusedProduct& product, const DifferentiateGateRows& epilogue,
                 cudaStream_t stream) {
  fused::run_gated<fused::DifferentiateGate>(product, epilogue, stream);
}

}  // namespace moe_parallel
