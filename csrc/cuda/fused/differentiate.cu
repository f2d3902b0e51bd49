#include "can_fuse.h"
#include "differentiate.cuh"
#include "launch.cuh"

namespace moe_parallel {

bool can_fuse(const FusedProduct& product, const DifferentiateRows& epilogue) {
  return fused::takes(product, fused::Layout::kByColumns) &&
         fused::takes_rows({epilogue.gate, epilogue.up, epilogue.dgate, epilogue.dup, epilogue.h},
                           {epilogue.stride, epilogue.dstride});
}

void run_on_cuda(const FusedProduct& product, const DifferentiateRows& epilogue,
                 cudaStream_t stream) {
  fused::run<fused::Differentiate, true>(product, epilogue, stream);
}

}  // namespace moe_parallel
