#include "activate.cuh"
#include "can_fuse.h"
#include "launch.cuh"

namespace moe_parallel {

bool can_fuse(const FusedProduct& product, const ActivateRows& epilogue) {
  return epilogue.gate && fused::takes(product, fused::Layout::kByRows) &&
         fused::takes_rows({epilogue.h, epilogue.gate, epilogue.up}, {epilogue.stride});
}

void run_on_cuda(const FusedProduct& product, const ActivateRows& epilogue, cudaStream_t stream) {
  fused::run<fused::Activate, false>(product, epilogue, stream);
}

}  // namespace moe_parallel
