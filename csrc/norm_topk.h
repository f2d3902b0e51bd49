#pragma once

#include <cstdint>

#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// norms[t, e] = || c_TER[t, e, :] ||, summed in the type of the norms.
struct GroupNorms {
  ScalarType type;    // of c_TER
  const void* c_TER;  // [tokens, num_experts, rank]
  void* norms;        // [tokens, num_experts] in the type of sums
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

// c_TKR[t, j, :] = c_TER[t, experts[t, j], :]
struct PickChosen {
  const void* c_TER;       // [tokens, num_experts, row_bytes]
  const int64_t* experts;  // [tokens, k]
  void* c_TKR;             // [tokens, k, row_bytes]
  int64_t tokens;
  int64_t num_experts;
  int64_t k;
  int64_t row_bytes;
};

constexpr int kColumnsOfSquares = 32;

// squares[t, j] = the sum of the squares of columns 32 j to 32 j + 31 of C = x W of all experts, in
// float and before any rounding.
struct SumSquares {
  ScalarType type;  // of x, w and c
  const void* x;    // [tokens, depth], rows `x_stride` elements apart
  const void* w;    // [num_experts, depth, rank], matrices and rows at these distances
  float* squares;   // [tokens, num_experts * rank / 32]
  void* c;          // [tokens, num_experts * rank]; null: not kept
  int64_t tokens;
  int64_t num_experts;
  int64_t depth;
  int64_t rank;
  int64_t x_stride;
  int64_t expert_stride;
  int64_t w_stride;
};

// The three tasks above for one C. If SumSquares has run, C is read only for c_TKR.
struct ScoreTokens {
  ScalarType type;    // of c_TER and c_TKR
  const void* c_TER;  // [tokens, num_experts, rank]
  const void* bias;   // [num_experts] in the type of sums; null: none
  void* norms;        // [tokens, num_experts] in the type of sums
  int64_t* experts;   // [tokens, k]
  void* c_TKR;        // [tokens, k, rank]; null: not computed
  int64_t tokens;
  int64_t num_experts;
  int64_t rank;
  int64_t k;
  int64_t row_bytes;               // of `rank` elements
  const float* squares = nullptr;  // of SumSquares, only on CUDA; null: none
};

// dc_TER[t, e, :] = factors[t, e] * c_TER[t, e, :], plus dc_TKR[t, j, :] if experts[t, j] is e.
// dc_TER and c_TER may be the same memory.
struct NormGradient {
  ScalarType type;         // of c_TER, dc_TKR and dc_TER
  const void* c_TER;       // [tokens, num_experts, rank]
  const void* factors;     // [tokens, num_experts] in the type of sums
  const int64_t* experts;  // [tokens, k], -1: none; null if dc_TKR is null
  const void* dc_TKR;      // [tokens, k, rank]; null: none
  void* dc_TER;            // [tokens, num_experts, rank]
  int64_t tokens;
  int64_t num_experts;
  int64_t rank;
  int64_t k;
};

void run_on_cpu(const GroupNorms& task);
void run_on_cpu(const SelectTopK& task);
void run_on_cpu(const PickChosen& task);
void run_on_cpu(const ScoreTokens& task);
void run_on_cpu(const NormGradient& task);
// Returns false, and does nothing, where a product and then ScoreTokens are faster: everywhere but
// on Hopper, in 16 bits.
bool run_on_cpu(const SumSquares& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const ScoreTokens& task, cudaStream_t stream);
void run_on_cuda(const NormGradient& task, cudaStream_t stream);
bool run_on_cuda(const SumSquares& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
