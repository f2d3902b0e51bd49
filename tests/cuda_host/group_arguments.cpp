// The arguments of CUTLASS's kernels, as the device computes them.
#include "cuda/cutlass/group_arguments.cuh"

namespace {

// The layout of cutlass::gemm::GemmCoord and of cute::Shape<int, int, int>.
struct Problem {
  int m, n, k;
  Problem(int m, int n, int k) : m(m), n(n), k(k) {}
};

}  // namespace

extern "C" {
int64_t group_arguments_bytes(int64_t groups) {
  return moe_parallel::GroupArguments<Problem>::bytes(groups);
}

void group_arguments(const moe_parallel::GroupedProduct* task, void* memory) {
  moe_parallel::launch_arguments<Problem>(*task, memory, nullptr);
}
}
