#include "../swiglu.h"

#include "capability.h"
#include "large_output.h"
#include "parts.h"

namespace moe_parallel {

void run_on_cpu(const Swiglu& task) {
  advise_huge_pages(task.h, task.rows * task.width * bytes_of(task.type));
  in_parts(task.rows, task.width, kernels().swiglu, task);
}

void run_on_cpu(const SwigluBackward& task) {
  const int64_t bytes = bytes_of(task.type);
  advise_huge_pages(task.dgate, ((task.rows - 1) * task.dgate_stride + task.width) * bytes);
  advise_huge_pages(task.dup, ((task.rows - 1) * task.dup_stride + task.width) * bytes);
  if (task.h) advise_huge_pages(task.h, task.rows * task.width * bytes);
  in_parts(task.rows, task.width, kernels().swiglu_backward, task);
}

}  // namespace moe_parallel
