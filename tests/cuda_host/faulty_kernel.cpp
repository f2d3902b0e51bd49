// A small kernel with the instructions of csrc/cuda/fused/hopper_ptx.cuh, which omits one of its
// duties on request. test_faults_are_seen.py checks that the emulation detects the omission.
#include "cuda/fused/hopper_stage.cuh"
#include "cuda/launch.cuh"

using namespace moe_parallel;
using namespace moe_parallel::fused::hopper;

namespace {

constexpr int kGroup = 128;  // threads that copy, and as many that multiply
constexpr int kRounds = 3;   // through one stage

enum Duty {
  kWaitForCopies,
  kOrderCopies,
  kBeginProducts,
  kWaitForProducts,
  kReleaseAfterProducts,
  kReleaseAtAll,
  kWaitForRelease,
  kWaitForLastCopies,
  kNone,
};

void copy_ones(const __nv_bfloat16* ones, Duty left_out) {
  for (unsigned round = 0; round < kRounds; ++round) {
    if (left_out != kWaitForRelease) ptx::wait(barriers().empty[0], round % 2 ^ 1);
    for (int i = 0; i < 2 * kSlabBytes; i += kGroup * 16) {
      ptx::copy_async(slab_of(0, kA) + i + threadIdx.x * 16, ones, true);
    }
    ptx::arrive_after_copies(barriers().full[0]);
  }
  if (left_out != kWaitForLastCopies) ptx::wait_for_all_copies();
}

void multiply_ones(Duty left_out, float* result) {
  ptx::Sums sums = {};
  for (unsigned round = 0; round < kRounds; ++round) {
    if (left_out != kWaitForCopies) ptx::wait(barriers().full[0], round % 2);
    if (left_out != kOrderCopies) ptx::order_copies_before_wgmma();
    if (left_out != kBeginProducts) ptx::begin_wgmma();
    ptx::wgmma<__nv_bfloat16, true>(sums, describe(slab_of(0, kA), 16),
                                    describe(slab_of(0, kFirst), 16));
    ptx::commit_wgmma();
    if (left_out == kReleaseAfterProducts) {  // and the next copies arrive before the products
      ptx::arrive(barriers().empty[0]);
      ptx::wait(barriers().full[0], (round + 1) % 2);
    }
    if (left_out != kWaitForProducts) ptx::wait_for_wgmma<0>();
    if (left_out != kReleaseAtAll) ptx::arrive(barriers().empty[0]);
  }
  *result = sums[15][3];
}

void run_rounds(const __nv_bfloat16* ones, float* results, Duty left_out) {
  if (threadIdx.x == 0) {
    ptx::make_barrier(barriers().full[0], kGroup);
    ptx::make_barrier(barriers().empty[0], kGroup);
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    copy_ones(ones, left_out);
  } else {
    multiply_ones(left_out, results + threadIdx.x - kGroup);
  }
}

}  // namespace

// Returns the sum of one thread. Each round adds 16 products of ones to it.
extern "C" float multiply_without(int left_out) {
  alignas(16) __nv_bfloat16 ones[8];
  for (auto& one : ones) one = __float2bfloat16_rn(1);
  float results[kGroup];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(2 * kGroup);
  config.dynamicSmemBytes = kSharedBytes;
  const __nv_bfloat16* from = ones;
  float* to = results;
  cudaLaunchKernelEx(&config, run_rounds, from, to, static_cast<Duty>(left_out));
  return results[kGroup / 2];
}
