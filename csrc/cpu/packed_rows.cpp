#include "../packed_rows.h"

// A few bytes for each choice, which threads would not make faster.
namespace moe_parallel {

void run_on_cpu(const FindVisits& task) {
  for (int64_t i = 0; i < task.tokens * task.choices; ++i) find_visit(task, i);
}

void run_on_cpu(const WriteEnds& task) {
  for (int64_t row = 0; row < task.ends.rows; ++row) {
    task.ends.is_double ? write_end<double>(task, row) : write_end<float>(task, row);
  }
}

void run_on_cpu(const ReadEnds& task) {
  for (int64_t row = 0; row < task.ends.rows; ++row) {
    task.ends.is_double ? read_end<double>(task, row) : read_end<float>(task, row);
  }
}

}  // namespace moe_parallel
