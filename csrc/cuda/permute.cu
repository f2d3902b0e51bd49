#include "../permute.h"
#include "rows.cuh"

namespace moe_parallel {
namespace {

constexpr int kWordsInFlight = 4;

struct TokenOfRow {
  const int64_t* slots;
  int64_t tokens;
  int64_t choices;

  __device__ int64_t operator()(int64_t row) const {
    const int64_t slot = slots[row];
    return slot < 0 || slot >= tokens * choices ? -1 : slot / choices;
  }
};

// One warp a token: its row is read once and written as often as it was chosen.
template <class Word>
__global__ void spread_rows(Permute task, int64_t words) {
  const auto* x = static_cast<const Word*>(task.x);
  auto* y = static_cast<Word*>(task.y);
  for (int64_t token = first_warp(); token < task.tokens; token += num_warps()) {
    const int64_t* rows = task.row_of_choice + token * task.choices;
    for (int64_t first = lane_index(); first < words; first += kWordsInFlight * kWarp) {
      Word word[kWordsInFlight];
#pragma unroll
      for (int j = 0; j < kWordsInFlight; ++j) {
        const int64_t i = first + j * kWarp;
        if (i < words) word[j] = x[token * words + i];
      }
      for (int64_t k = 0; k < task.choices; ++k) {
        const int64_t row = rows[k];
        if (row < 0 || row >= task.rows) continue;
#pragma unroll
        for (int j = 0; j < kWordsInFlight; ++j) {
          const int64_t i = first + j * kWarp;
          if (i < words) y[row * words + i] = word[j];
        }
      }
    }
  }
  clear_padding(task.slots, task.tokens * task.choices, y, task.rows, words);
}

void launch_spread(const Permute& task, cudaStream_t stream) {
  const int64_t warps = std::max(task.tokens, (task.rows + kWarp - 1) / kWarp);
  with_words(task.x, task.y, task.row_bytes, [&](auto word) {
    using Word = decltype(word);
    launch_kernel(spread_rows<Word>, blocks_for(warps, kWarpsPerBlock), stream, task,
                  task.row_bytes / static_cast<int64_t>(sizeof(Word)));
  });
}

}  // namespace

void run_on_cuda(const Permute& task, cudaStream_t stream) {
  if (task.rows == 0 || task.row_bytes == 0) return;
  if (task.row_of_choice && task.choices > 1) return launch_spread(task, stream);
  launch_gather(task.x, task.y, task.rows, task.row_bytes,
                TokenOfRow{task.slots, task.tokens, task.choices}, stream);
}

}  // namespace moe_parallel
