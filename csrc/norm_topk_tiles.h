// C = x W of all experts in tiles of tokens: what the selection and its gradient share.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "launch.h"
#include "scratch_rows.h"

namespace moe_parallel {

constexpr int64_t kTileMinTokens = 64;  // smaller products are no faster

// Of C on a GPU, where each tile reads all of W, and in the backward pass also reads and writes dW.
// A product of the few tokens of a smaller tile would leave multiprocessors without work.
constexpr int64_t kCudaTileBytes = int64_t{128} << 20;

inline void check_product(const at::Tensor& x, const at::Tensor& w) {
  check_dim("x", x, 2);
  check_dim("w", w, 3);
  TORCH_CHECK_VALUE(w.size(1) == x.size(1), "x has ", x.size(1), " columns, but w takes ",
                    w.size(1));
  check_together(x, {w});
  check_same_type("w", w, "x", x);
}

// The matrices of all experts side by side: [E, D, R] -> [D, E R].
inline at::Tensor concatenate(const at::Tensor& w) {
  return w.permute({1, 0, 2}).reshape({w.size(1), w.size(0) * w.size(2)});
}

// The tiles of tokens, and memory for the columns that are computed from one tile.
class Tiles {
 public:
  // `cpu_bytes`: the most that the columns of a tile may take on a CPU.
  Tiles(const at::Tensor& x, int64_t columns, int64_t cpu_bytes)
      : tokens_(x.size(0)),
        tile_(tokens_of_tile(x, columns, x.is_cuda() ? kCudaTileBytes : cpu_bytes)),
        memory_(x, tile_, columns) {}

  // Calls body(first, tokens) for every tile.
  template <class Body>
  void for_each(const Body& body) const {
    for (int64_t first = 0; first < tokens_; first += tile_) {
      body(first, std::min(tile_, tokens_ - first));
    }
  }

  at::Tensor columns(int64_t tokens) { return memory_.rows(tokens); }

 private:
  static int64_t tokens_of_tile(const at::Tensor& x, int64_t columns, int64_t tile_bytes) {
    const int64_t token_bytes = std::max<int64_t>(columns * x.element_size(), 1);
    const int64_t tile = std::max(tile_bytes / token_bytes, kTileMinTokens);
    return std::clamp<int64_t>(tile, 1, std::max<int64_t>(x.size(0), 1));
  }

  int64_t tokens_, tile_;
  ScratchRows memory_;
};

}  // namespace moe_parallel
