// What a fused product needs to run, and which mainloop runs it.
#pragma once

#include "../vector.cuh"
#include "ampere.cuh"

namespace moe_parallel::fused {

int attribute(cudaDeviceAttr attribute);  // of the current GPU

template <bool kSideBySide>
int64_t most_tiles(const FusedProduct& product) {
  constexpr int64_t kRows = AmpereTile::kRows;
  const int64_t down = (product.rows + kRows - 1) / kRows + (product.offsets ? product.groups : 0);
  return down * tiles_across<kSideBySide>(product);
}

template <class Scalar, bool kByColumns, class Epilogue>
void launch(const FusedProduct& product, const Epilogue& epilogue, cudaStream_t stream) {
  const auto kernel = multiply_on_ampere<Scalar, kByColumns, Epilogue>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       AmpereTile::kSharedBytes);
  const int64_t blocks = std::min<int64_t>(most_tiles<Epilogue::kSideBySide>(product),
                                           attribute(cudaDevAttrMultiProcessorCount));
  if (blocks == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = AmpereTile::kSharedBytes;
  config.stream = stream;
  cudaLaunchKernelEx(&config, kernel, product, epilogue);
}

// run<Epilogue<Scalar>>(product, task, stream) for the type of the product.
template <template <class> class Epilogue, bool kByColumns, class Task>
void run(const FusedProduct& product, const Task& task, cudaStream_t stream) {
  if (product.type == ScalarType::kBFloat16) {
    launch<__nv_bfloat16, kByColumns>(product, Epilogue<__nv_bfloat16>{task}, stream);
  } else {
    launch<__half, kByColumns>(product, Epilogue<__half>{task}, stream);
  }
}

}  // namespace moe_parallel::fused
