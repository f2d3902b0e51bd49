// The Python module. Operators declare themselves where they are implemented (launch.h).
#include <pybind11/pybind11.h>

#include "build_config.h"  // written by setup.py
#include "cpu/capability.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Native operators of moe_parallel, registered as torch.ops.moe_parallel.*";
  m.def(
      "build_info",
      [] {
        pybind11::dict info;
        info["cuda"] = MOE_PARALLEL_BUILT_WITH_CUDA;
        info["torch"] = MOE_PARALLEL_BUILT_FOR_TORCH;
        info["cuda_architectures"] = MOE_PARALLEL_CUDA_ARCHITECTURES;
        info["cutlass"] = MOE_PARALLEL_BUILT_WITH_CUTLASS;
        info["cpu_capability"] = moe_parallel::cpu_capability().name;
        return info;
      },
      "What this was built with: cuda (bool), torch (its version), cuda_architectures (a str), "
      "cutlass (bool); and cpu_capability, the vector instructions that the CPU kernels use here "
      "(a str).");
}
