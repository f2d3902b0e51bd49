#include "../softmax.h"

#include "capability.h"
#include "parts.h"

namespace moe_parallel {

void run_on_cpu(const SoftmaxSums& task) {
  in_parts(task.rows, task.width, kernels().softmax_sums, task);
}

void run_on_cpu(const SoftmaxGradient& task) {
  in_parts(task.rows, task.width, kernels().softmax_gradient, task);
}

}  // namespace moe_parallel
