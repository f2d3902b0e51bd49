#include "../routing_map.h"
#include "scalar.cuh"

// One block a chunk. Each thread walks the whole chunk for experts of its own, so that the order
// inside an expert is the order of the choices and nothing is added atomically. The threads of a
// warp read the same choice at a time, which costs one read.
namespace moe_parallel {
namespace {

__device__ inline int64_t end_of_chunk(int64_t chunk, int64_t chunk_size, int64_t choices) {
  const int64_t end = (chunk + 1) * chunk_size;
  return end < choices ? end : choices;
}

__global__ void count_choices(CountChoices task) {
  for (int64_t chunk = blockIdx.x; chunk < task.chunks; chunk += gridDim.x) {
    const int64_t end = end_of_chunk(chunk, task.chunk_size, task.choices);
    for (int64_t bin = threadIdx.x; bin <= task.num_experts; bin += blockDim.x) {
      int64_t count = 0;
      for (int64_t choice = chunk * task.chunk_size; choice < end; ++choice) {
        const int64_t expert = task.experts[choice];
        count += (expert < 0 ? task.num_experts : expert) == bin && expert < task.num_experts;
      }
      task.counts[bin * task.chunks + chunk] = count;
    }
  }
}

__global__ void place_choices(PlaceChoices task) {
  for (int64_t chunk = blockIdx.x; chunk < task.chunks; chunk += gridDim.x) {
    const int64_t end = end_of_chunk(chunk, task.chunk_size, task.choices);
    for (int64_t expert = threadIdx.x; expert < task.num_experts; expert += blockDim.x) {
      int64_t row = task.first_row[expert * task.chunks + chunk];
      for (int64_t choice = chunk * task.chunk_size; choice < end; ++choice) {
        if (task.experts[choice] != expert) continue;
        task.slots[row] = choice;
        task.rows[choice] = row;
        ++row;
      }
    }
  }
}

}  // namespace

void run_on_cuda(const CountChoices& task, cudaStream_t stream) {
  count_choices<<<blocks_for(task.chunks, 1), kThreads, 0, stream>>>(task);
}

void run_on_cuda(const PlaceChoices& task, cudaStream_t stream) {
  place_choices<<<blocks_for(task.chunks, 1), kThreads, 0, stream>>>(task);
}

}  // namespace moe_parallel
