// The launch of a fused product, and the selection of its mainloop.
#pragma once

#include "../vector.cuh"
#include "ampere.cuh"
#include "hopper.cuh"

namespace moe_parallel::fused {

int attribute(cudaDeviceAttr attribute);  // of the current GPU

// Whether the current GPU has wgmma and this build has code for it. sm_90a runs only on compute
// capability 9.0.
bool runs_hopper();

template <class Epilogue>
struct Mainloop {
  void (*kernel)(FusedProduct, Epilogue);
  int threads;
  int shared_bytes;
};

template <class Scalar, bool kByColumns, class Epilogue>
Mainloop<Epilogue> mainloop_for(const FusedProduct& product) {
  using hopper::Parts;
  if (runs_hopper()) {
    if (hopper::fits<Parts::kForBoth>(product)) {
      return {hopper::multiply_on_hopper<Scalar, kByColumns, Parts::kForBoth, Epilogue>,
              hopper::kBlock, hopper::kSharedBytes};
    }
    if constexpr (!Epilogue::kSideBySide) {
      if (hopper::fits<Parts::kForOneEach>(product)) {
        return {hopper::multiply_on_hopper<Scalar, kByColumns, Parts::kForOneEach, Epilogue>,
                hopper::kBlock, hopper::kSharedBytes};
      }
    }
  }
  return {multiply_on_ampere<Scalar, kByColumns, Epilogue>, kThreads, AmpereTile::kSharedBytes};
}

template <bool kSideBySide>
int64_t most_tiles(const FusedProduct& product) {
  const int64_t down =
      (product.rows + kTileRows - 1) / kTileRows + (product.offsets ? product.groups : 0);
  return down * tiles_across<kSideBySide>(product);
}

template <class Scalar, bool kByColumns, class Epilogue>
void launch(const FusedProduct& product, const Epilogue& epilogue, cudaStream_t stream) {
  const auto mainloop = mainloop_for<Scalar, kByColumns, Epilogue>(product);
  const int64_t blocks = std::min<int64_t>(most_tiles<Epilogue::kSideBySide>(product),
                                           attribute(cudaDevAttrMultiProcessorCount));
  if (blocks == 0) return;
  const cudaError_t refused = cudaFuncSetAttribute(
      mainloop.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, mainloop.shared_bytes);
  if (refused != cudaSuccess) return;  // the caller checks the last error
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(mainloop.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(mainloop.shared_bytes);
  config.stream = stream;
  cudaLaunchKernelEx(&config, mainloop.kernel, product, epilogue);
}

// Launches the product with Epilogue<Scalar> for the product's type.
template <template <class> class Epilogue, bool kByColumns, class Task>
void run(const FusedProduct& product, const Task& task, cudaStream_t stream) {
  if (product.type == ScalarType::kBFloat16) {
    launch<__nv_bfloat16, kByColumns>(product, Epilogue<__nv_bfloat16>{task}, stream);
  } else {
    launch<__half, kByColumns>(product, Epilogue<__half>{task}, stream);
  }
}

}  // namespace moe_parallel::fused
