#include "../softmax.h"

#include "capability.h"
#include "parts.h"

namespace moe_parallel {

void run_on_cpu(const SoftmaxSums& task, int64_t rows) {
  in_parts(rows, task.width, kernels().softmax_sums, task);
}

void run_on_cpu(const SoftmaxGradient& task, int64_t rows) {
  in_parts(rows, task.width, kernels().softmax_gradient, task);
}

}  // namespace moe_parallel
