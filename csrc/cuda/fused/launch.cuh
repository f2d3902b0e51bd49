// The launch of a fused product, and the selection of its mainloop.
#pragma once

#include "../vector.cuh"
#include "ampere.cuh"
#include "gated.cuh"
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
Mainloop<Epilogue> mainloop() {
  if (runs_hopper()) {
    return {hopper::multiply_on_hopper<Scalar, kByColumns, Epilogue>, hopper::kBlock,
            hopper::kSharedBytes};
  }
  return {multiply_on_ampere<Scalar, kByColumns, Epilogue>, kThreads, AmpereTile::kSharedBytes};
}

template <int kRows, bool kSideBySide>
int64_t most_tiles(const FusedProduct& product) {
  const int64_t down = (product.rows + kRows - 1) / kRows + (product.offsets ? product.groups : 0);
  return down * tiles_across<kSideBySide>(product);
}

template <class Epilogue>
void launch(const Mainloop<Epilogue>& by, int64_t blocks, const FusedProduct& product,
            const Epilogue& epilogue, cudaStream_t stream) {
  if (blocks == 0) return;
  const cudaError_t refused =
      cudaFuncSetAttribute(by.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, by.shared_bytes);
  if (refused != cudaSuccess) return;  // the caller checks the last error
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(by.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(by.shared_bytes);
  config.stream = stream;
  cudaLaunchKernelEx(&config, by.kernel, product, epilogue);
}

// The number of persistent blocks, of which a multiprocessor has `per_processor` at a time.
inline int64_t persistent_blocks(int64_t tiles, int per_processor) {
  return std::min<int64_t>(tiles, per_processor * attribute(cudaDevAttrMultiProcessorCount));
}

// Launches the product with Epilogue<Scalar> for the product's type.
template <template <class> class Epilogue, bool kByColumns, class Task>
void run(const FusedProduct& product, const Task& task, cudaStream_t stream) {
  const auto start = [&](auto scalar) {
    using Scalar = decltype(scalar);
    const int64_t tiles = most_tiles<kTileRows, Epilogue<Scalar>::kSideBySide>(product);
    launch(mainloop<Scalar, kByColumns, Epilogue<Scalar>>(), persistent_blocks(tiles, 1), product,
           Epilogue<Scalar>{task}, stream);
  };
  product.type == ScalarType::kBFloat16 ? start(__nv_bfloat16{}) : start(__half{});
}

// The same for a product whose sums are a gate.
template <template <class> class Epilogue, class Task>
void run_gated(const FusedProduct& product, const Task& task, cudaStream_t stream) {
  const auto start = [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Mainloop<Epilogue<Scalar>> gated{multiply_gated<Scalar, Epilogue<Scalar>>, kThreads,
                                           GatedTile::kSharedBytes};
    const int64_t tiles = most_tiles<GatedTile::kRows, false>(product);
    launch(gated, persistent_blocks(tiles, GatedTile::kBlocks), product, Epilogue<Scalar>{task},
           stream);
  };
  product.type == ScalarType::kBFloat16 ? start(__nv_bfloat16{}) : start(__half{});
}

}  // namespace moe_parallel::fused
