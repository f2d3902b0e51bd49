#include "../routing_map.h"
#include "launch.cuh"
#include "reduce.cuh"

// One block per chunk of choices. Each of its warps sorts a part of the chunk, 32 choices at a
// time. __match_any_sync finds the lanes with the same expert, and the first of them counts for
// all. So nothing is added atomically, and the choices of an expert keep their order. The experts
// are processed in ranges of kExpertsPerRange, for which shared memory has counters.
namespace moe_parallel {
namespace {

constexpr int kExpertsPerRange = 1024;

struct Counters {
  int of_warp[kWarpsPerBlock][kExpertsPerRange];
};

struct Span {
  int64_t begin, end;
};

// The choices of this thread's warp in a chunk.
template <class Task>
__device__ inline Span span_of_warp(const Task& task, int64_t chunk) {
  const int64_t end = min((chunk + 1) * task.chunk_size, task.choices);
  const int64_t per_warp = (task.chunk_size + kWarpsPerBlock - 1) / kWarpsPerBlock;
  const int64_t begin = chunk * task.chunk_size + warp_in_block() * per_warp;
  return {min(begin, end), min(begin + per_warp, end)};
}

// The bin of a choice in the range that begins with `first_bin`, or -1 if the bin is in another
// range or the choice has none.
__device__ inline int bin_of(int64_t expert, int64_t num_experts, int64_t first_bin) {
  if (expert >= num_experts) return -1;
  const int64_t bin = (expert < 0 ? num_experts : expert) - first_bin;
  return bin < 0 || bin >= kExpertsPerRange ? -1 : static_cast<int>(bin);
}

__device__ inline int bins_in_range(int64_t num_experts, int64_t first_bin) {
  return static_cast<int>(min(num_experts + 1 - first_bin, int64_t{kExpertsPerRange}));
}

__device__ inline void clear(Counters& counters, int bins) {
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    for (int warp = 0; warp < kWarpsPerBlock; ++warp) counters.of_warp[warp][bin] = 0;
  }
  __syncthreads();
}

// Calls place(choice, bin, earlier) for every choice of the span that has a bin in this range, and
// counts it. `earlier` is the number of choices with the same bin before it in this warp's counter.
template <class Place>
__device__ inline void walk(const int64_t* experts, int64_t num_experts, Span span,
                            int64_t first_bin, int* counter, const Place& place) {
  for (int64_t first = span.begin; first < span.end; first += kWarp) {
    const int64_t choice = first + lane_index();
    const int bin = choice < span.end ? bin_of(experts[choice], num_experts, first_bin) : -1;
    const unsigned same = __match_any_sync(kAllLanes, bin);
    const unsigned before = same & ((1u << lane_index()) - 1);
    const int earlier = bin < 0 ? 0 : counter[bin] + __popc(before);
    __syncwarp();
    if (bin >= 0) {
      if (before == 0) counter[bin] += __popc(same);
      place(choice, bin, earlier);
    }
    __syncwarp();
  }
}

__global__ void count_choices(CountChoices task) {
  __shared__ Counters counters;
  for (int64_t chunk = blockIdx.x; chunk < task.chunks; chunk += gridDim.x) {
    for (int64_t first = 0; first <= task.num_experts; first += kExpertsPerRange) {
      const int bins = bins_in_range(task.num_experts, first);
      clear(counters, bins);
      walk(task.experts, task.num_experts, span_of_warp(task, chunk), first,
           counters.of_warp[warp_in_block()], [](int64_t, int, int) {});
      __syncthreads();
      for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
        int64_t count = 0;
        for (int warp = 0; warp < kWarpsPerBlock; ++warp) count += counters.of_warp[warp][bin];
        task.counts[(first + bin) * task.chunks + chunk] = count;
      }
      __syncthreads();
    }
  }
}

// One block per expert. Each block reads the counts of all experts before its own. For hundreds of
// experts, that costs less than the launch of another kernel.
__global__ void find_rows(FindRows task) {
  for (int64_t expert = blockIdx.x; expert < task.num_experts; expert += gridDim.x) {
    const bool is_padded = task.pad_rows_per_expert >= 0;
    int64_t row = is_padded && threadIdx.x == 0 ? expert * task.pad_rows_per_expert : 0;
    for (int64_t i = threadIdx.x; !is_padded && i < expert * task.chunks; i += kThreads) {
      row += task.chunk_counts[i];
    }
    row = sum_over_block(row);
    if (warp_in_block() > 0) continue;

    const int64_t first_row_of_expert = __shfl_sync(kAllLanes, row, 0);
    row = first_row_of_expert;
    for (int64_t first = 0; first < task.chunks; first += kWarp) {
      const int64_t chunk = first + lane_index(), i = expert * task.chunks + chunk;
      const int64_t count = chunk < task.chunks ? task.chunk_counts[i] : 0;
      const int64_t through = sum_up_to_lane(count);
      if (chunk < task.chunks) task.first_row[i] = row + through - count;
      row += __shfl_sync(kAllLanes, through, kWarp - 1);
    }
    if (lane_index() > 0) continue;
    const int64_t placed = min(row, task.max_rows) - min(first_row_of_expert, task.max_rows);
    task.counts[expert] = is_padded ? task.pad_rows_per_expert : placed;
  }
}

// Replaces the counters of each warp by the number of choices of the warps before it.
__device__ inline void scan_warps(Counters& counters, int bins) {
  __syncthreads();
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    int earlier = 0;
    for (int warp = 0; warp < kWarpsPerBlock; ++warp) {
      const int count = counters.of_warp[warp][bin];
      counters.of_warp[warp][bin] = earlier;
      earlier += count;
    }
  }
  __syncthreads();
}

__device__ inline int64_t end_of_rows(const PlaceChoices& task, int64_t expert) {
  if (task.pad_rows_per_expert < 0) return task.num_rows;
  return min((expert + 1) * task.pad_rows_per_expert, task.num_rows);
}

__global__ void place_choices(PlaceChoices task) {
  __shared__ Counters counters;
  for (int64_t chunk = blockIdx.x; chunk < task.chunks; chunk += gridDim.x) {
    const Span span = span_of_warp(task, chunk);
    for (int64_t first = 0; first < task.num_experts; first += kExpertsPerRange) {
      const int bins = bins_in_range(task.num_experts, first);
      clear(counters, bins);
      int* counter = counters.of_warp[warp_in_block()];
      walk(task.experts, task.num_experts, span, first, counter, [](int64_t, int, int) {});
      scan_warps(counters, bins);
      walk(task.experts, task.num_experts, span, first, counter,
           [&](int64_t choice, int bin, int earlier) {
             const int64_t expert = first + bin;
             if (expert == task.num_experts) return;  // a choice that names no expert
             const int64_t row = task.first_row[expert * task.chunks + chunk] + earlier;
             if (row >= end_of_rows(task, expert)) return;
             task.slots[row] = choice;
             task.rows[choice] = row;
           });
      __syncthreads();
    }
  }
}

}  // namespace

void run_on_cuda(const CountChoices& task, cudaStream_t stream) {
  launch_kernel(count_choices, blocks_for(task.chunks, 1), stream, task);
}

void run_on_cuda(const FindRows& task, cudaStream_t stream) {
  if (task.num_experts == 0) return;
  launch_kernel(find_rows, blocks_for(task.num_experts, 1), stream, task);
}

void run_on_cuda(const PlaceChoices& task, cudaStream_t stream) {
  launch_kernel(place_choices, blocks_for(task.chunks, 1), stream, task);
}

}  // namespace moe_parallel
