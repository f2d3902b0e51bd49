// The Python module. Each operator is declared in the file that implements it (launch.h).
#include <pybind11/pybind11.h>

#include "attention.h"
#include "build_config.h"  // written by setup.py
#include "cpu/capability.h"
#include "onednn_product.h"

// ops/extension.py reads it from the file, before it loads the file.
[[gnu::used]] static const char built_for_torch[] =
    "moe_parallel was built for torch " MOE_PARALLEL_BUILT_FOR_TORCH;

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
  pybind11::enum_<moe_parallel::CpuProducts>(m, "CpuProducts")
      .value("BLAS", moe_parallel::CpuProducts::kBlas)
      .value("WHERE_FASTER", moe_parallel::CpuProducts::kWhereFaster)
      .value("ONEDNN", moe_parallel::CpuProducts::kOneDnn);
  m.def("set_cpu_products", &moe_parallel::set_cpu_products,
        "Which library computes products with results in fp32 on the CPU, for this process: "
        "torch.mm, what was measured to be faster on this processor (default), or oneDNN. Returns "
        "what held before.");
  m.def(
      "has_fast_attention",
      [](bool in_bf16) {
        return moe_parallel::has_fast_attention(in_bf16 ? moe_parallel::ScalarType::kBFloat16
                                                        : moe_parallel::ScalarType::kFloat32);
      },
      pybind11::arg("in_bf16"),
      "Whether attention in fp32, or in bf16, was measured to be faster than torch's on processors "
      "of this kind.");
}
