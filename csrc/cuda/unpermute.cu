#include "../unpermute.h"
#include "reduce.cuh"
#include "vector.cuh"

namespace moe_parallel {
namespace {

constexpr int kChoicesInFlight = 4;  // their rows are read before the first one is added
constexpr int kBlocksOfSums = 5;     // of a multiprocessor, so 40 warps read at a time

template <class Task>
__device__ inline bool has_row(const Task& task, int64_t row) {
  return row >= 0 && row < task.num_rows;
}

// One warp per token. Each lane sums complete columns in the order of the choices. Whether there
// are probs is a template parameter: a branch between the loads would take 20 more registers, and
// then too few warps fit to keep the memory busy.
template <class Scalar, int kSize, bool kHasProbs>
__global__ void __launch_bounds__(kThreads, kBlocksOfSums) sum_rows(Unpermute task) {
  using Sum = sum_t<Scalar>;
  const auto* y = static_cast<const Scalar*>(task.y);
  auto* out = static_cast<Scalar*>(task.out);
  const int choices = static_cast<int>(task.choices);
  for (int64_t token = first_warp(); token < task.tokens; token += num_warps()) {
    const int64_t* rows = task.rows + token * choices;
    const Sum* probs = kHasProbs ? static_cast<const Sum*>(task.probs) + token * choices : nullptr;
    for (int64_t i = lane_index(); i < task.width / kSize; i += kWarp) {
      Sum sums[kSize] = {};
      for (int k = 0; k < choices; k += kChoicesInFlight) {
        Vector<Scalar, kSize> x[kChoicesInFlight];
        Sum prob[kChoicesInFlight];
#pragma unroll
        for (int j = 0; j < kChoicesInFlight; ++j) {
          const int64_t row = k + j < choices ? rows[k + j] : -1;
          prob[j] = 0;
          x[j] = {};
          if (!has_row(task, row)) continue;
          prob[j] = kHasProbs ? probs[k + j] : Sum{1};
          x[j] = load<Scalar, kSize>(y + row * task.y_stride, i);
        }
#pragma unroll
        for (int j = 0; j < kChoicesInFlight; ++j) add_scaled(x[j], prob[j], sums);
      }
      store(round_to<Scalar>(sums), out + token * task.out_stride, i);
    }
  }
}

// Writes the gradients of the rows and of the probs of one token's choices from k on, as many as
// are in flight.
template <class Scalar, int kSize>
__device__ inline void spread_choices(const UnpermuteBackward& task, int64_t token, int64_t k) {
  using Sum = sum_t<Scalar>;
  const auto* y = static_cast<const Scalar*>(task.y);
  const auto* dout = static_cast<const Scalar*>(task.dout) + token * task.width;
  auto* dy = static_cast<Scalar*>(task.dy);
  const int64_t first = token * task.choices + k;
  int64_t row[kChoicesInFlight];
  Sum prob[kChoicesInFlight];
  Sum dprob[kChoicesInFlight] = {};
#pragma unroll
  for (int j = 0; j < kChoicesInFlight; ++j) {
    row[j] = k + j < task.choices ? task.rows[first + j] : -1;
    prob[j] = has_row(task, row[j]) ? static_cast<const Sum*>(task.probs)[first + j] : Sum{0};
  }
  for (int64_t i = lane_index(); i < task.width / kSize; i += kWarp) {
    const auto gradient = load<Scalar, kSize>(dout, i);
    Vector<Scalar, kSize> x[kChoicesInFlight];
#pragma unroll
    for (int j = 0; j < kChoicesInFlight; ++j) {
      if (has_row(task, row[j])) x[j] = load<Scalar, kSize>(y + row[j] * task.width, i);
    }
#pragma unroll
    for (int j = 0; j < kChoicesInFlight; ++j) {
      if (!has_row(task, row[j])) continue;
      dprob[j] += dot(gradient, x[j]);
      Sum scaled[kSize] = {};
      add_scaled(gradient, prob[j], scaled);
      store(round_to<Scalar>(scaled), dy + row[j] * task.width, i);
    }
  }
#pragma unroll
  for (int j = 0; j < kChoicesInFlight; ++j) {
    const Sum sum = sum_over_lanes(dprob[j]);
    if (lane_index() == 0 && k + j < task.choices) static_cast<Sum*>(task.dprobs)[first + j] = sum;
  }
}

// y[n] = 0 if slots[n] names none of the `choices`. A warp checks 32 rows at a time.
template <class Word>
__device__ inline void clear_padding(const int64_t* slots, int64_t choices, Word* y, int64_t rows,
                                     int64_t words) {
  for (int64_t first = first_warp() * kWarp; first < rows; first += num_warps() * kWarp) {
    const int64_t mine = first + lane_index();
    const int64_t slot = mine < rows ? slots[mine] : 0;
    const bool is_padding = mine < rows && (slot < 0 || slot >= choices);
    const unsigned padding = __ballot_sync(kAllLanes, is_padding);
    for (int j = 0; j < kWarp; ++j) {
      if (!(padding >> j & 1)) continue;
      for (int64_t i = lane_index(); i < words; i += kWarp) y[(first + j) * words + i] = Word{};
    }
  }
}

// One warp per token.
template <class Scalar, int kSize>
__global__ void spread_gradient(UnpermuteBackward task) {
  for (int64_t token = first_warp(); token < task.tokens; token += num_warps()) {
    for (int64_t k = 0; k < task.choices; k += kChoicesInFlight) {
      spread_choices<Scalar, kSize>(task, token, k);
    }
  }
  using Word = Vector<Scalar, kSize>;
  clear_padding(task.slots, task.tokens * task.choices, static_cast<Word*>(task.dy), task.num_rows,
                task.width / kSize);
}

}  // namespace

void run_on_cuda(const Unpermute& task, cudaStream_t stream) {
  if (task.tokens == 0 || task.width == 0) return;
  with_vectors(task.type, {task.y, task.out}, {task.width, task.y_stride, task.out_stride},
               [&](auto scalar, auto size) {
                 using Scalar = decltype(scalar);
                 const auto kernel =
                     task.probs ? sum_rows<Scalar, size(), true> : sum_rows<Scalar, size(), false>;
                 launch_kernel(kernel, blocks_for(task.tokens, kWarpsPerBlock), stream, task);
               });
}

void run_on_cuda(const UnpermuteBackward& task, cudaStream_t stream) {
  const int64_t warps = std::max(task.tokens, (task.num_rows + kWarp - 1) / kWarp);
  if (warps == 0) return;
  with_vectors(task.type, {task.dout, task.y, task.dy}, {task.width}, [&](auto scalar, auto size) {
    launch_kernel(spread_gradient<decltype(scalar), size()>, blocks_for(warps, kWarpsPerBlock),
                  stream, task);
  });
}

}  // namespace moe_parallel
