#include "../rotary.h"

#include "capability.h"
#include "parts.h"

namespace moe_parallel {

void run_on_cpu(const Rotary& task) {
  in_parts(task.length * task.batch, task.heads_of_token() * 2 * task.half, kernels().rotary, task);
}

}  // namespace moe_parallel
