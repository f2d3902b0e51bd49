#include "activate_gate.cuh"
#include "can_fuse.h"
#include "launch.cuh"

namespace moe_parallel {

bool can_fuse(const FusedProduct& product, const ActivateGateRows& epilogue) {
  return fused::takes_gate(product) && fused::takes_rows({epilogue.up, epilogue.h}, {});
}

void run_on_cuda(const FusedProduct& product, const ActivateGateRows& epilogue,
                 cudaStream_t stream) {
  fused::run_gated<fused::ActivateGate>(product, epilogue, stream);
}

}  // namespace moe_parallel
