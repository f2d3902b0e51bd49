#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

#ifdef __CUDACC__
#define MOE_PARALLEL_HOST_DEVICE __host__ __device__
#else
#define MOE_PARALLEL_HOST_DEVICE
#endif

namespace moe_parallel {

// norms[t, e] = || c[t, e, :] ||, summed in the type of the norms.
struct GroupNorms {
  ScalarType type;  // of c
  const void* c;    // [tokens, num_experts, rank]
  void* norms;      // [tokens, num_experts] in the type of sums
  int64_t tokens;
  int64_t num_experts;
  int64_t rank;
};

// experts[t, :] = the indices of the k largest of norms[t, :] + bias, in descending order. In a tie
// the lower index comes first.
struct SelectTopK {
  ScalarType type;    // of norms and bias: float or double
  const void* norms;  // [tokens, num_experts]
  const void* bias;   // [num_experts]; null: none
  int64_t* experts;   // [tokens, k]
  int64_t tokens;
  int64_t num_experts;
  int64_t k;
};

// c_chosen[t, j, :] = c[t, experts[t, j], :]
struct PickChosen {
  const void* c;           // [tokens, num_experts, row_bytes]
  const int64_t* experts;  // [tokens, k]
  void* c_chosen;          // [tokens, k, row_bytes]
  int64_t tokens;
  int64_t num_experts;
  int64_t k;
  int64_t row_bytes;
};

// The three tasks above for one C. If a product has already summed the squares of C, C is read only
// for `c_chosen`.
struct ScoreTokens {
  ScalarType type;   // of c and c_chosen
  const void* c;     // [tokens, num_experts, rank]
  const void* bias;  // [num_experts] in the type of sums; null: none
  void* norms;       // [tokens, num_experts] in the type of sums
  int64_t* experts;  // [tokens, k]
  void* c_chosen;    // [tokens, k, rank]; null: not computed
  int64_t tokens;
  int64_t num_experts;
  int64_t rank;
  int64_t k;
  int64_t row_bytes;  // of `rank` elements
  // [tokens, num_experts, squares_per_norm], only on CUDA; null: none
  const float* squares = nullptr;
  int64_t squares_per_norm = 0;
};

// dc[t, e, :] = factors[t, e] * c[t, e, :], plus dc_chosen[t, j, :] if experts[t, j] is e. dc and c
// may be the same memory.
struct NormGradient {
  ScalarType type;         // of c, dc_chosen and dc
  const void* c;           // [tokens, num_experts, rank]
  const void* factors;     // [tokens, num_experts] in the type of sums
  const int64_t* experts;  // [tokens, k], -1: none; null if dc_chosen is null
  const void* dc_chosen;   // [tokens, k, rank]; null: none
  void* dc;                // [tokens, num_experts, rank]
  int64_t tokens;
  int64_t num_experts;
  int64_t rank;
  int64_t k;
};

// Whether p comes before q in descending order. The order is total: NaN counts as the largest, as
// in torch.sort, and in a tie the lower index comes first.
template <class Norm>
MOE_PARALLEL_HOST_DEVICE inline bool ranks_before(Norm p, int64_t p_index, Norm q,
                                                  int64_t q_index) {
  const bool p_is_nan = p != p;
  const bool q_is_nan = q != q;
  if (p_is_nan != q_is_nan) return p_is_nan;
  if (!p_is_nan && p != q) return p > q;
  return p_index < q_index;
}

// Each choice is the first expert in that order that comes after the previous choice.
template <class Norm>
MOE_PARALLEL_HOST_DEVICE inline void select_topk(const Norm* norms, const Norm* bias,
                                                 int64_t num_experts, int64_t k, int64_t* chosen) {
  const auto score = [&](int64_t e) { return bias ? norms[e] + bias[e] : norms[e]; };
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; ++e) {
      const bool is_left = j == 0 || ranks_before(score(chosen[j - 1]), chosen[j - 1], score(e), e);
      if (is_left && (best < 0 || ranks_before(score(e), e, score(best), best))) best = e;
    }
    chosen[j] = best;
  }
}

void run_on_cpu(const GroupNorms& task);
void run_on_cpu(const SelectTopK& task);
void run_on_cpu(const PickChosen& task);
void run_on_cpu(const ScoreTokens& task);
void run_on_cpu(const NormGradient& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const ScoreTokens& task, cudaStream_t stream);
void run_on_cuda(const NormGradient& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
