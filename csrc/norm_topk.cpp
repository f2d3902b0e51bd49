// AoE's selection, and its gradients: through all norms, or through the chosen norms.
//
// C = x W of all experts is computed in tiles of tokens. `keep` says what stays: nothing, the C of
// the chosen experts, or also the C of all experts, which the backward pass then need not
// recompute.
#include "norm_topk.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "launch.h"
#include "norm_topk_gradient.h"
#include "product.h"
#include "scratch_rows.h"

namespace moe_parallel {
namespace {

constexpr int64_t kTileMinTokens = 64;  // smaller products are no faster

// Of C in a tile on a GPU, where each tile reads all of W, and in the backward pass also reads and
// writes dW. A product of the few tokens of a smaller tile would leave multiprocessors without
// work.
constexpr int64_t kCudaTileBytes = int64_t{128} << 20;

void check_product(const at::Tensor& x, const at::Tensor& w) {
  check_dim("x", x, 2);
  check_dim("w", w, 3);
  TORCH_CHECK_VALUE(w.size(1) == x.size(1), "x has ", x.size(1), " columns, but w takes ",
                    w.size(1));
  check_together(x, {w});
  check_same_type("w", w, "x", x);
}

// The matrices of all experts side by side: [E, D, R] -> [D, E R].
at::Tensor concatenate(const at::Tensor& w) {
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

// Of dC: more than in the forward pass, because each tile also reads and writes dW.
constexpr int64_t kCpuGradientTileBytes = int64_t{32} << 20;

// Checks the C of some experts of each token, or its gradient.
void check_product_of(const char* name, const at::Tensor& c, const at::Tensor& x, int64_t experts,
                      int64_t rank) {
  check_together(x, {c});
  check_sizes(name, c, {x.size(0), experts, rank});
  check_same_type(name, c, "x", x);
}

void check_scores(const at::Tensor& dnorms, const at::Tensor& x, const at::Tensor& w,
                  const at::Tensor& norms, const at::Tensor& experts) {
  check_product(x, w);
  check_together(x, {dnorms, norms, experts});
  check_sizes("norms", norms, {x.size(0), w.size(0)});
  check_sizes("dnorms", dnorms, norms.sizes());
  check_index("experts", experts, 2);
}

// dC[t, e] = dnorms[t, e] / norms[t, e] * C[t, e], where the quotient is 0 if the norm is 0. For
// the chosen experts, the gradient of c_TKR is added. Without c_TER, C is recomputed.
std::tuple<at::Tensor, at::Tensor> norm_topk_backward(const at::Tensor& dnorms,
                                                      const std::optional<at::Tensor>& dc_TKR,
                                                      const at::Tensor& x, const at::Tensor& w,
                                                      const at::Tensor& norms,
                                                      const at::Tensor& experts,
                                                      const std::optional<at::Tensor>& c_TER) {
  check_scores(dnorms, x, w, norms, experts);
  const int64_t num_experts = w.size(0), rank = w.size(2);
  at::Tensor c_3d, dc_TKR_3d;
  if (c_TER) {
    check_product_of("c_TER", *c_TER, x, num_experts, rank);
    c_3d = c_TER->contiguous();
  }
  if (dc_TKR) {
    check_product_of("dc_TKR", *dc_TKR, x, experts.size(1), rank);
    dc_TKR_3d = dc_TKR->contiguous();
  }

  const auto factors = norm_factors(dnorms, norms).to(sum_type_of(x)).contiguous();
  const auto w_cat = concatenate(w);
  const auto experts_2d = experts.contiguous();
  auto dx = at::empty(x.sizes(), x.options());
  // The tiles are added in the type of sums, so that the result is rounded to bf16 only once.
  auto dw_cat = at::empty(w_cat.sizes(), w.options().dtype(sum_type_of(w)));
  if (x.size(0) == 0) dw_cat.zero_();
  Tiles tiles(x, w_cat.size(1), kCpuGradientTileBytes);
  tiles.for_each([&](int64_t first, int64_t tokens) {
    const auto x_tile = x.narrow(0, first, tokens);
    auto dc = tiles.columns(tokens);
    if (!c_TER) product_out(dc, x_tile, w_cat);
    const auto tile_of = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, first, tokens).const_data_ptr();
    };
    launch(x, NormGradient{.type = scalar_type_of("x", x),
                           .c_TER = c_TER ? tile_of(c_3d) : dc.const_data_ptr(),
                           .factors = tile_of(factors),
                           .experts = static_cast<const int64_t*>(tile_of(experts_2d)),
                           .dc_TKR = dc_TKR ? tile_of(dc_TKR_3d) : nullptr,
                           .dc_TER = dc.mutable_data_ptr(),
                           .tokens = tokens,
                           .num_experts = num_experts,
                           .rank = rank,
                           .k = experts.size(1)});
    auto dx_tile = dx.narrow(0, first, tokens);
    product_out(dx_tile, dc, w_cat.t());
    product_out(dw_cat, x_tile.t(), dc, /*accumulate=*/first > 0);
  });
  const auto dw = dw_cat.view({w.size(1), num_experts, rank}).permute({1, 0, 2});
  const auto dense = w.options().memory_format(at::MemoryFormat::Contiguous);
  return {dx, dw.to(dense).contiguous()};  // the latter copies what has this type already
}

// The same through the norms of the chosen experts only: K products with x per token, not E. The
// row map is that of `experts`. Without c_TKR, C is recomputed.
std::tuple<at::Tensor, at::Tensor> norm_topk_chosen_backward(
    const at::Tensor& dnorms, const std::optional<at::Tensor>& dc_TKR, const at::Tensor& x,
    const at::Tensor& w, const at::Tensor& norms, const at::Tensor& experts,
    const std::optional<at::Tensor>& c_TKR, const at::Tensor& slots, const at::Tensor& rows,
    const at::Tensor& counts) {
  check_scores(dnorms, x, w, norms, experts);
  check_sizes("counts", counts, {w.size(0)});
  if (c_TKR) check_product_of("c_TKR", *c_TKR, x, experts.size(1), w.size(2));
  if (dc_TKR) check_product_of("dc_TKR", *dc_TKR, x, experts.size(1), w.size(2));
  const auto chosen = experts.clamp_min(0);  // empty slots have no row
  const auto factors = norm_factors(dnorms.gather(1, chosen), norms.gather(1, chosen));
  const auto factors_TK = factors.to(sum_type_of(x));
  const ExpertRows map(x, factors_TK, slots, rows, counts);
  const RowBlock all{0, w.size(0), 0, map.size(), map.size(), true, counts};
  const auto memory_of = [&](int64_t columns) { return ScratchRows(x, map.size(), columns); };
  auto x_memory = memory_of(x.size(1)), c_memory = memory_of(w.size(2));
  auto dc_memory = memory_of(w.size(2));
  const auto x_of = [&](const RowBlock& block) {
    return map.gather(x_memory, x.contiguous(), block);
  };
  const auto c_of = [&](const RowBlock& block) {
    if (c_TKR) {
      map.gather_choices(c_memory, with_dense_rows(c_TKR->flatten(0, 1)), block);
    } else {
      auto c_rows = block.part(c_memory);
      grouped_gemm_out(c_rows, block.product(x_memory), w, counts);
    }
  };
  const auto dc_of = [&](const RowBlock& block) {
    return dc_TKR ? map.gather_choices(dc_memory, with_dense_rows(dc_TKR->flatten(0, 1)), block)
                  : at::Tensor();
  };
  TransposedRows memory;
  WeightGradient dw("w", w, counts, memory);
  auto dx = x.new_empty({map.size(), x.size(1)});
  // A kernel that added dc_TKR at once would leave a rounding out, and runs of earlier versions
  // would not continue bit for bit.
  ChosenNormGradient{w, dw, dx, /*adds_to_dx=*/false, /*rounds_before_adding=*/true}.take(
      {all}, map.values_by_row(factors_TK), c_memory, x_of, c_of, dc_of);
  return {map.sum(dx), dw.own()};
}

}  // namespace
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
