// Products of groups of rows by CUTLASS, on tensor cores. Torch-free.
#pragma once

#include "../../grouped_gemm_product.h"

namespace moe_parallel {

// The GPU that a product runs on, and which code in this build it runs.
struct Device {
  int index;
  int multiprocessors;
  bool runs_ampere;  // sm_80, or what comes later by PTX
  bool runs_hopper;  // sm_90a, on 9.0 alone
};

// Whether run_on_cutlass() computes this product: of 16-bit types and, if tf32 may stand in for
// it, float, on rows and sizes that are multiples of 16 bytes and less than 2^31.
bool cutlass_takes(const GroupedProduct& task, const Device& device, bool tf32);

// The bytes that it needs meanwhile.
int64_t cutlass_workspace(const GroupedProduct& task, const Device& device);

// Null, or what CUTLASS has against it.
const char* run_on_cutlass(const GroupedProduct& task, const Device& device, void* workspace,
                           cudaStream_t stream);

}  // namespace moe_parallel
