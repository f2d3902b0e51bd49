#pragma once

#include <cstdint>

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// A stable counting sort of the choices by expert, in three steps. The choices are divided into
// chunks (a single one on the CPU). Each chunk is counted separately, because these counts
// determine where its rows begin in each expert.

// counts[e, c] = the number of choices of chunk c that name expert e. counts[num_experts, c] = the
// number of those that name no expert (negative). A choice of num_experts or more is not counted.
struct CountChoices {
  const int64_t* experts;  // [choices]
  int64_t* counts;         // [num_experts + 1, chunks]
  int64_t choices;
  int64_t num_experts;
  int64_t chunks;
  int64_t chunk_size;
};

// first_row[e, c] = the number of rows of the experts before e, plus the number of choices of e in
// the chunks before c.
struct FindRows {
  const int64_t* chunk_counts;  // [num_experts + 1, chunks], from CountChoices
  int64_t* counts;              // [num_experts], the rows of each expert
  int64_t* first_row;           // [num_experts, chunks]
  int64_t num_experts;
  int64_t pad_rows_per_expert;  // negative: no padding
  int64_t max_rows;             // of all experts without padding; what is beyond has no row
  int64_t chunks;
};

// The i-th choice of chunk c that names expert e gets row first_row[e, c] + i. The entries of
// `slots` and `rows` that belong to no choice are not written. A choice is left out if its row
// would be num_rows or more, or beyond the rows of its expert.
struct PlaceChoices {
  const int64_t* experts;    // [choices]
  const int64_t* first_row;  // [num_experts, chunks]
  int64_t* slots;            // [rows]
  int64_t* rows;             // [choices]
  int64_t choices;
  int64_t num_experts;
  int64_t num_rows;
  int64_t pad_rows_per_expert;  // negative: no padding
  int64_t chunks;
  int64_t chunk_size;
};

void run_on_cpu(const CountChoices& task);
void run_on_cpu(const FindRows& task);
void run_on_cpu(const PlaceChoices& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const CountChoices& task, cudaStream_t stream);
void run_on_cuda(const FindRows& task, cudaStream_t stream);
void run_on_cuda(const PlaceChoices& task, cudaStream_t stream);
#endif

}  // namespace moe_parallel
