#include "../routing_map.h"

#include <algorithm>
#include <vector>

// Each task is one pass over a few bytes per token, which threads would not make faster.
namespace moe_parallel {

void run_on_cpu(const CountChoices& task) {
  for (int64_t choice = 0; choice < task.choices; ++choice) {
    const int64_t expert = task.experts[choice];
    if (expert >= task.num_experts) continue;
    const int64_t bin = expert < 0 ? task.num_experts : expert;
    ++task.counts[bin * task.chunks + choice / task.chunk_size];
  }
}

void run_on_cpu(const FindRows& task) {
  int64_t first_row_of_expert = 0;
  for (int64_t expert = 0; expert < task.num_experts; ++expert) {
    int64_t row = first_row_of_expert;
    for (int64_t i = expert * task.chunks; i < (expert + 1) * task.chunks; ++i) {
      task.first_row[i] = row;
      row += task.chunk_counts[i];
    }
    const int64_t chosen = std::min(row, task.max_rows) - first_row_of_expert;
    task.counts[expert] = task.pad_rows_per_expert < 0 ? chosen : task.pad_rows_per_expert;
    first_row_of_expert += task.counts[expert];
  }
}

void run_on_cpu(const PlaceChoices& task) {
  std::vector<int64_t> next_row(task.first_row, task.first_row + task.num_experts * task.chunks);
  for (int64_t choice = 0; choice < task.choices; ++choice) {
    const int64_t expert = task.experts[choice];
    if (expert < 0) continue;
    const int64_t row = next_row[expert * task.chunks + choice / task.chunk_size]++;
    const bool is_padded = task.pad_rows_per_expert >= 0;
    if (row >= (is_padded ? (expert + 1) * task.pad_rows_per_expert : task.num_rows)) continue;
    task.slots[row] = choice;
    task.rows[choice] = row;
  }
}

}  // namespace moe_parallel
