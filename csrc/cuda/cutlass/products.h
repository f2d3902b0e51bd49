// Grouped products by CUTLASS, on tensor cores. Torch-free.
#pragma once

#include "../../grouped_gemm_product.h"

namespace moe_parallel {

// The GPU that a product runs on, and the code of this build that it can run.
struct Device {
  int index;
  int multiprocessors;
  bool runs_ampere;  // sm_80, or later GPUs through PTX
  bool runs_hopper;  // sm_90a, only on compute capability 9.0
};

// Whether run_on_cutlass() supports this product. The type must have 16 bits, or be float if `tf32`
// allows TF32 in its place. Sizes must be less than 2^31, and rows and addresses must be multiples
// of 16 bytes.
bool cutlass_takes(const GroupedProduct& task, const Device& device, bool tf32);

// The size of the workspace that run_on_cutlass() needs, in bytes.
int64_t cutlass_workspace(const GroupedProduct& task, const Device& device);

// Returns null, or CUTLASS's error message.
const char* run_on_cutlass(const GroupedProduct& task, const Device& device, void* workspace,
                           cudaStream_t stream);

}  // namespace moe_parallel
