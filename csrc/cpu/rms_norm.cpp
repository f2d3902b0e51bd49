#include "../rms_norm.h"

#include "capability.h"
#include "large_output.h"
#include "parts.h"

namespace moe_parallel {

void run_on_cpu(const RmsNorm& task) {
  advise_huge_pages(task.y, task.rows * task.width * bytes_of(task.type));
  in_parts(task.rows, task.width, kernels().rms_norm, task);
}

void run_on_cpu(const RmsNormBackward& task) {
  advise_huge_pages(task.dx, task.rows * task.width * bytes_of(task.type));
  in_parts(task.parts(), kRmsNormRows * task.width, kernels().rms_norm_backward, task);
}

}  // namespace moe_parallel
