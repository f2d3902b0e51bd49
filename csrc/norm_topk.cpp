// AoE's selection. C = x W of all experts is computed in tiles of tokens. `keep` says what stays:
// nothing, the C of the chosen experts, or also the C of all experts, which the backward pass then
// need not recompute.
#include "norm_topk.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>

#include "grouped_gemm_wide.h"
#include "launch.h"
#include "norm_topk_gradient.h"
#include "norm_topk_tiles.h"

namespace moe_parallel {
namespace {

constexpr int64_t kCpuTileBytes = int64_t{16} << 20;  // of C

// The words of `keep` in moe_parallel/ops/types.py.
enum class Keep { kNothing, kChosen, kAll };

Keep keep_of(c10::string_view word) {
  if (word == "nothing") return Keep::kNothing;
  if (word == "chosen") return Keep::kChosen;
  TORCH_CHECK_VALUE(word == "all", "keep must be nothing, chosen or all, not ", word);
  return Keep::kAll;
}

// The results that are computed from C, tile by tile.
struct Selection {
  at::Tensor bias;  // undefined: none
  at::Tensor norms, experts;
  at::Tensor c_TKR;  // empty: not computed
  int64_t rank;

  // `squares`: from sum_squares(), or undefined. With squares, `c` may be undefined if c_TKR is not
  // computed.
  void score(int64_t first, int64_t tokens, const at::Tensor& c, const at::Tensor& squares,
             ScalarType type, int64_t row_bytes) {
    const auto tile_of = [&](at::Tensor& tensor) {
      return tensor.narrow(0, first, tokens).mutable_data_ptr();
    };
    launch(norms,
           ScoreTokens{.type = type,
                       .c_TER = c.defined() ? c.const_data_ptr() : nullptr,
                       .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
                       .norms = tile_of(norms),
                       .experts = static_cast<int64_t*>(tile_of(experts)),
                       .c_TKR = c_TKR.numel() > 0 ? tile_of(c_TKR) : nullptr,
                       .tokens = tokens,
                       .num_experts = norms.size(1),
                       .rank = rank,
                       .k = experts.size(1),
                       .row_bytes = row_bytes,
                       .squares = squares.defined() ? squares.const_data_ptr<float>() : nullptr});
  }
};

// Computes C = x W in a kernel that also sums the squares of C, and returns these sums. Returns an
// undefined tensor if no kernel supports it. `c` is written if it is defined.
at::Tensor sum_squares(const at::Tensor& x, const at::Tensor& w, const at::Tensor& c) {
  const int64_t columns = w.size(0) * w.size(2);
  if (x.stride(1) != 1 || w.stride(2) != 1 || w.size(2) % kColumnsOfSquares != 0) return {};
  const auto squares =
      at::empty({x.size(0), columns / kColumnsOfSquares}, x.options().dtype(at::kFloat));
  const SumSquares task{.type = scalar_type_of("x", x),
                        .x = x.const_data_ptr(),
                        .w = w.const_data_ptr(),
                        .squares = squares.mutable_data_ptr<float>(),
                        .c = c.defined() ? c.mutable_data_ptr() : nullptr,
                        .tokens = x.size(0),
                        .num_experts = w.size(0),
                        .depth = x.size(1),
                        .rank = w.size(2),
                        .x_stride = x.stride(0),
                        .expert_stride = w.stride(0),
                        .w_stride = w.stride(1)};
#ifdef MOE_PARALLEL_CUDA
  if (x.is_cuda()) {
    const c10::cuda::CUDAGuard guard(x.device());
    if (!run_on_cuda(task, at::cuda::getCurrentCUDAStream())) return {};
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return squares;
  }
#endif
  return run_on_cpu(task) ? squares : at::Tensor();
}

}  // namespace

// k is 0 where a rule outside selects.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_topk(
    const at::Tensor& x, const at::Tensor& w, int64_t k, const std::optional<at::Tensor>& bias,
    c10::string_view keep_word) {
  check_product(x, w);
  const int64_t num_experts = w.size(0), rank = w.size(2);
  TORCH_CHECK_VALUE(0 <= k && k <= num_experts, "k must lie in 0..", num_experts,
                    " (the number of experts), not ", k);
  const Keep keep = keep_of(keep_word);
  Selection to{.bias = {},
               .norms = at::empty({x.size(0), num_experts}, x.options().dtype(sum_type_of(x))),
               .experts = at::empty({x.size(0), k}, x.options().dtype(at::kLong)),
               .c_TKR = x.new_empty({keep == Keep::kNothing ? 0 : x.size(0), k, rank}),
               .rank = rank};
  if (bias) {
    check_together(x, {*bias});
    check_sizes("bias", *bias, {num_experts});
    to.bias = bias->to(sum_type_of(x)).contiguous();
  }
  const bool keep_all = keep == Keep::kAll;
  auto c_TER = x.new_empty({keep_all ? x.size(0) : 0, num_experts, rank});
  const auto type = scalar_type_of("x", x);
  const int64_t row_bytes = rank * static_cast<int64_t>(x.element_size());

  // If C is either kept completely or not needed again, one kernel can compute the norms of all
  // tokens at once. Otherwise C is needed again for c_TKR, and the tiles below keep it small.
  if (keep != Keep::kChosen) {
    const auto c_if_kept = keep_all ? c_TER : at::Tensor();
    const auto squares = sum_squares(x, w, c_if_kept);
    if (squares.defined()) {
      to.score(0, x.size(0), c_if_kept, squares, type, row_bytes);
      return {to.norms, to.experts, to.c_TKR, c_TER};
    }
  }
  at::Tensor w_cat;
  Tiles tiles(x, num_experts * rank, kCpuTileBytes);
  tiles.for_each([&](int64_t first, int64_t tokens) {
    const auto x_tile = x.narrow(0, first, tokens);
    auto c_tile = keep_all ? c_TER.narrow(0, first, tokens).flatten(1) : tiles.columns(tokens);
    const auto squares = sum_squares(x_tile, w, c_tile);
    if (!squares.defined()) {
      if (!w_cat.defined()) w_cat = concatenate(w);
      product_out(c_tile, x_tile, w_cat);
    }
    to.score(first, tokens, c_tile, squares, type, row_bytes);
  });
  return {to.norms, to.experts, to.c_TKR, c_TER};
}

}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("norm_topk",
                      "(Tensor x, Tensor w, int k, Tensor? bias, str keep) "
                      "-> (Tensor norms, Tensor experts, Tensor c_TKR, Tensor c_TER)",
                      moe_parallel::norm_topk)
MOE_PARALLEL_OPERATOR("norm_topk_backward",
                      "(Tensor dnorms, Tensor? dc_TKR, Tensor x, Tensor w, Tensor norms, "
                      "Tensor experts, Tensor? c_TER) -> (Tensor dx, Tensor dw)",
                      moe_parallel::norm_topk_backward)
MOE_PARALLEL_OPERATOR("norm_topk_chosen_backward",
                      "(Tensor dnorms, Tensor? dc_TKR, Tensor x, Tensor w, Tensor norms, "
                      "Tensor experts, Tensor? c_TKR, Tensor slots, Tensor rows, Tensor counts) "
                      "-> (Tensor dx, Tensor dw)",
                      moe_parallel::norm_topk_chosen_backward)
