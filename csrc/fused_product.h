// Grouped products on CUDA's tensor cores, in one kernel with the steps before and after them. The
// kernel gathers the rows while it loads them, and the epilogue works on sums that are still in
// registers.
//
// A product has two accumulators, `first` and `second`, and each thread holds corresponding columns
// of both. The accumulators belong either to two matrices, such as the gate and the up projection
// of SwiGLU, or to two adjacent ranges of columns of one matrix. A product whose sums are a gate
// has `first` alone.
#pragma once

#include <cstdint>
#include <variant>

#include "grouped_gemm_product.h"
#include "scalar_type.h"

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// Row n is data[slots[n] / choices], or zeros if slots[n] is out of range. Without slots, row n is
// data[n].
struct GatheredRows {
  const void* data;      // [source_rows, depth], rows `stride` elements apart
  const int64_t* slots;  // [rows]; null: row n is data[n]
  int64_t choices;
  int64_t source_rows;
  int64_t stride;
};

// The rows of each group times its matrices, [depth, columns], are added to `first` and `second`.
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
  int64_t columns;  // of the result, or of each accumulator if these belong to two matrices
  // The number of columns of one matrix. After them the next group's matrix begins, so that several
  // matrices side by side form one.
  int64_t columns_per_matrix;
};

constexpr int kColumnsOfSum = 32;  // columns that an epilogue sums; the caller adds these sums

// d = the product, or d += the product. The columns of `second` follow those of `first`.
struct StoreRows {
  void* d;         // [rows, columns]
  int64_t stride;  // elements between two rows
  bool accumulate;
};

// h = silu(first) * second * prob. The sums are first rounded to the product's type, so that h is
// the same as the result of swiglu.h for `gate` and `up`, which store the rounded sums.
struct ActivateRows {
  const float* probs;  // [rows]; null for 1
  void* h;             // [rows, columns]
  void* gate;          // [rows, columns], rows `stride` elements apart
  void* up;            // the same
  int64_t stride;
};

// squares[n, j] = the sum of the squares of columns 32 j to 32 j + 31, computed in float before any
// rounding. The columns of `second` follow those of `first`.
struct SquareRows {
  float* squares;  // [rows, columns / 32]
  void* c;         // [rows, columns], the product itself; null: not kept
};

// The product is dh, which stays in registers. The results are the gradients of SwiGLU's inputs,
// and h, which is recomputed. The columns of `second` follow those of `first`.
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

// The product is the gate, which stays in registers: h = silu(gate) * up * prob. As above, the gate
// is first rounded.
struct ActivateGateRows {
  const float* probs;  // [rows]; null for 1
  const void* up;      // [rows, columns]
  void* h;             // the same
};

// The product is the gate, which stays in registers. The results are those of DifferentiateRows.
struct DifferentiateGateRows {
  const float* probs;  // [rows]; null for 1
  const void* dh;      // [rows, columns]
  const void* up;      // the same
  void* dgate;         // the same
  void* dup;           // the same
  void* h;             // the same
  float* dprobs;       // [rows, columns / 32, rounded up]
};

using Epilogue = std::variant<StoreRows, ActivateRows, SquareRows, DifferentiateRows,
                              ActivateGateRows, DifferentiateGateRows>;

// Returns false and does nothing: on the CPU, BLAS computes the products, and nothing can be fused
// with them.
bool run_on_cpu(const FusedProduct& product, const Epilogue& epilogue);
#ifdef MOE_PARALLEL_CUDA
// Whether the current GPU and the layout allow the fused product: sm_80 or later, 16-bit types, and
// rows and addresses that are multiples of 16 bytes. The matrices must be all row-major for
// ActivateRows and SquareRows, all column-major for DifferentiateRows, and all of either layout for
// StoreRows. With a gate there is one row-major matrix, and only one accumulator.
bool can_fuse(const FusedProduct& product, const StoreRows& epilogue);
bool can_fuse(const FusedProduct& product, const ActivateRows& epilogue);
bool can_fuse(const FusedProduct& product, const SquareRows& epilogue);
bool can_fuse(const FusedProduct& product, const DifferentiateRows& epilogue);
bool can_fuse(const FusedProduct& product, const ActivateGateRows& epilogue);
bool can_fuse(const FusedProduct& product, const DifferentiateGateRows& epilogue);

// Whether these kernels were measured to be faster on the current GPU than CUTLASS's kernels and
// the separate steps around them.
bool is_faster_fused(const Epilogue& epilogue);

void run_on_cuda(const FusedProduct& product, const StoreRows& epilogue, cudaStream_t stream);
void run_on_cuda(const FusedProduct& product, const ActivateRows& epilogue, cudaStream_t stream);
void run_on_cuda(const FusedProduct& product, const SquareRows& epilogue, cudaStream_t stream);
void run_on_cuda(const FusedProduct& product, const DifferentiateRows& epilogue,
                 cudaStream_t stream);
void run_on_cuda(const FusedProduct& product, const ActivateGateRows& epilogue,
                 cudaStream_t stream);
void run_on_cuda(const FusedProduct& product, const DifferentiateGateRows& epilogue,
                 cudaStream_t stream);
#endif

}  // namespace moe_parallel
