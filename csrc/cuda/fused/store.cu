#include "can_fuse.h"
#include "launch.cuh"
#include "store.cuh"

namespace moe_parallel {

bool can_fuse(const FusedProduct& product, const StoreRows& epilogue) {
  return fused::takes(product, fused::Layout::kAny) &&
         fused::takes_rows({epilogue.d}, {epilogue.stride});
}

void run_on_cuda(const FusedProduct& product, const StoreRows& epilogue, cudaStream_t stream) {
  if (fused::lies_by_columns(product)) {
    fused::run<fused::Store, true>(product, epilogue, stream);
  } else {
    fused::run<fused::Store, false>(product, epilogue, stream);
  }
}

}  // namespace moe_parallel
