// The operators' schemas and the Python module; each operator is implemented in its own file.
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include "build_config.h"  // written by setup.py

TORCH_LIBRARY(moe_parallel, m) {
  m.def(
      "routing_map(Tensor experts, SymInt num_experts, SymInt? rows_per_expert) "
      "-> (Tensor slots, Tensor rows, Tensor counts)");
  m.def("permute(Tensor x, Tensor slots, Tensor rows) -> Tensor");
  m.def("unpermute(Tensor y, Tensor slots, Tensor rows, Tensor? gates) -> Tensor");
  m.def(
      "unpermute_backward(Tensor dout, Tensor y, Tensor slots, Tensor rows, Tensor gates) "
      "-> (Tensor dy, Tensor dgates)");
  m.def("grouped_gemm(Tensor x, Tensor w, Tensor counts) -> Tensor");
  m.def("grouped_outer(Tensor x, Tensor y, Tensor counts) -> Tensor");
  m.def("norm_topk(Tensor x, Tensor w, int k) -> (Tensor norms, Tensor experts)");
  m.def(
      "norm_topk_backward(Tensor dnorms, Tensor x, Tensor w, Tensor norms) "
      "-> (Tensor dx, Tensor dw)");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Native operators of moe_parallel, registered as torch.ops.moe_parallel.*";
  m.def(
      "build_info",
      [] {
        pybind11::dict info;
        info["cuda"] = MOE_PARALLEL_BUILT_WITH_CUDA;
        info["torch"] = MOE_PARALLEL_BUILT_FOR_TORCH;
        info["cuda_architectures"] = MOE_PARALLEL_CUDA_ARCHITECTURES;
        return info;
      },
      "What this was built with: cuda (bool), torch (its version), cuda_architectures (a str).");
}
