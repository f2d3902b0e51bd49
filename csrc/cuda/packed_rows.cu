// One thread per choice or row.
#include "../packed_rows.h"
#include "launch.cuh"

namespace moe_parallel {
namespace {

__global__ void find_visits(FindVisits task) {
  const int64_t choices = task.tokens * task.choices;
  for (int64_t i = first_thread(); i < choices; i += num_threads()) find_visit(task, i);
}

template <class Prob>
__global__ void write_ends(WriteEnds task) {
  for (int64_t row = first_thread(); row < task.ends.rows; row += num_threads()) {
    write_end<Prob>(task, row);
  }
}

template <class Prob>
__global__ void read_ends(ReadEnds task) {
  for (int64_t row = first_thread(); row < task.ends.rows; row += num_threads()) {
    read_end<Prob>(task, row);
  }
}

template <class Task>
void launch_over(void (*kernel)(Task), int64_t items, const Task& task, cudaStream_t stream) {
  if (items > 0) launch_kernel(kernel, blocks_for(items, kThreads), stream, task);
}

}  // namespace

void run_on_cuda(const FindVisits& task, cudaStream_t stream) {
  launch_over(find_visits, task.tokens * task.choices, task, stream);
}

void run_on_cuda(const WriteEnds& task, cudaStream_t stream) {
  launch_over(task.ends.is_double ? write_ends<double> : write_ends<float>, task.ends.rows, task,
              stream);
}

void run_on_cuda(const ReadEnds& task, cudaStream_t stream) {
  launch_over(task.ends.is_double ? read_ends<double> : read_ends<float>, task.ends.rows, task,
              stream);
}

}  // namespace moe_parallel
