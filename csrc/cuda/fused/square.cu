#include "can_fuse.h"
#include "launch.cuh"
#include "square.cuh"

namespace moe_parallel {

bool can_fuse(const FusedProduct& product, const SquareRows& epilogue) {
  return product.columns_per_matrix % kColumnsOfSum == 0 &&
         fused::takes(product, fused::Layout::kByRows) && fused::takes_rows({epilogue.c}, {});
}

void run_on_cuda(const FusedProduct& product, const SquareRows& epilogue, cudaStream_t stream) {
  fused::run<fused::Square, false>(product, epilogue, stream);
}

}  // namespace moe_parallel
