// Products of groups of rows on CUDA's tensor cores, in one kernel with what comes before and after
// them: rows gathered as they are loaded, and an epilogue on sums that are still in registers.
//
// A product has two accumulators, `first` and `second`, for columns that one thread then has side
// by side: the gate and the up projection of SwiGLU, which are two matrices, or two neighboring
// ranges of columns of one matrix.
#pragma once

#include <cstdint>
#include <variant>

#include "grouped_gemm_product.h"
#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// Row n is data[slots[n] / choices], and zeros where slots[n] names none; without slots data[n].
struct GatheredRows {
  const void* data;      // [source_rows, depth], rows `stride` elements apart
  const int64_t* slots;  // [rows]; null: the rows as they lie
  int64_t choices;
  int64_t source_rows;
  int64_t stride;
};

// The rows of a group times its matrix, [depth, columns], added to `first`, to `second` or both. A
// matrix without data adds nothing.
struct ProductPart {
  GatheredRows a;
  GroupedMatrix first, second;
  int64_t depth;
};

constexpr int kMostParts = 2;

struct FusedProduct {
  ScalarType type;  // kBFloat16 or kFloat16
  ProductPart parts[kMostParts];
  int num_parts;
  const int64_t* offsets;  // [groups + 1], on the device; null: one group of all rows
  int64_t groups;
  int64_t rows;     // of all groups
  int64_t columns;  // of the result: of each accumulator where they are two matrices
  // Every so many columns the next group's matrix goes on: several matrices side by side, as one.
  int64_t columns_per_matrix;
};

constexpr int kColumnsOfSum = 32;  // that an epilogue adds up; the rest is up to who reads the sums

// d = the product, or d += it. The columns of `second` follow those of `first`.
struct StoreRows {
  void* d;         // [rows, columns]
  int64_t stride;  // elements between two rows
  bool accumulate;
};

// h = silu(first) * second * probability, of sums that were rounded to the type first, so that it
// is what swiglu.h makes of `gate` and `up`, which keep them.
struct ActivateRows {
  const float* probs;  // [rows]; null for 1
  void* h;             // [rows, columns]
  void* gate;          // [rows, columns], rows `stride` elements apart; null: not kept
  void* up;            // the same
  int64_t stride;
};

// squares[n, j] = the sum of the squares of columns 32 j to 32 j + 31, in float before any
// rounding. The columns of `second` follow those of `first`.
struct SquareRows {
  float* squares;  // [rows, columns / 32]
  void* c;         // [rows, columns], the product itself; null: not kept
};

// dh = the product, in registers alone: the gradients of what SwiGLU read, and h once more.
// The columns of `second` follow those of `first`.
struct DifferentiateRows {
  const float* probs;  // [rows]; null for 1
  const void* gate;    // [rows, columns], rows `stride` elements apart
  const void* up;      // the same
  void* dgate;         // [rows, columns], rows `dstride` elements apart
  void* dup;           // the same
  void* h;             // [rows, columns]
  float* dprobs;       // [rows, columns / 32, rounded up]
  int64_t stride;
  int64_t dstride;
};

using Epilogue = std::variant<StoreRows, ActivateRows, SquareRows, DifferentiateRows>;

// On the CPU products are the BLAS's, which nothing is fused with: false, with nothing done.
bool run_on_cpu(const FusedProduct& product, const Epilogue& epilogue);
#ifdef MOE_PARALLEL_CUDA
// Whether the GPU of the current context and the layout allow it: sm_80 or later, 16-bit types,
// rows and addresses that are multiples of 16 bytes, and matrices that all lie by rows (or all by
// columns where only StoreRows and DifferentiateRows follow).
bool can_fuse(const FusedProduct& product, const StoreRows& epilogue);
bool can_fuse(const FusedProduct& product, const ActivateRows& epilogue);
bool can_fuse(const FusedProduct& product, const SquareRows& epilogue);
bool can_fuse(const FusedProduct& product, const DifferentiateRows& epilogue);

// Whether these kernels were measured to be faster on the current GPU than CUTLASS's and the steps
// around them.
bool is_faster_fused();

void run_on_cuda(const FusedProduct& product, const StoreRows& epilogue, cudaStream_t stream);
void run_on_cuda(const FusedProduct& product, const ActivateRows& epilogue, cudaStream_t stream);
void run_on_cuda(const FusedProduct& product, const SquareRows& epilogue, cudaStream_t stream);
void run_on_cuda(const FusedProduct& product, const DifferentiateRows& epilogue,
                 cudaStream_t stream);
#endif

}  // namespace moe_parallel
