#include "../permute.h"
#include "rows.cuh"

namespace moe_parallel {
namespace {

struct TokenOfRow {
  const int64_t* slots;
  int64_t tokens;
  int64_t choices;

  __device__ int64_t operator()(int64_t row) const {
    const int64_t slot = slots[row];
    return slot < 0 || slot >= tokens * choices ? -1 : slot / choices;
  }
};

}  // namespace

void run_on_cuda(const Permute& task, cudaStream_t stream) {
  launch_gather(task.x, task.y, task.rows, task.row_bytes,
                TokenOfRow{task.slots, task.tokens, task.choices}, stream);
}

}  // namespace moe_parallel
