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

// Whether the row belongs to this choice, according to both directions of the map. If so,
// spread_token() writes the row; if not, fill_rows() does.
__device__ inline bool belongs(const Permute& task, int64_t row, int64_t choice) {
  return choice >= 0 && choice < task.tokens * task.choices && row >= 0 && row < task.rows &&
         task.row_of_choice[choice] == row && task.slots[row] == choice;
}

// One warp per token. The token's row is read once and written once per choice.
template <class Word>
__device__ inline void spread_token(const Permute& task, int64_t token, int64_t words) {
  const auto* x = static_cast<const Word*>(task.x) + token * words;
  auto* y = static_cast<Word*>(task.y);
  for (int64_t first = lane_index(); first < words; first += kWordsInFlight * kWarp) {
    Word word[kWordsInFlight];
#pragma unroll
    for (int j = 0; j < kWordsInFlight; ++j) {
      if (first + j * kWarp < words) word[j] = x[first + j * kWarp];
    }
    for (int64_t k = 0; k < task.choices; ++k) {
      const int64_t choice = token * task.choices + k, row = task.row_of_choice[choice];
      if (!belongs(task, row, choice)) continue;
#pragma unroll
      for (int j = 0; j < kWordsInFlight; ++j) {
        const int64_t i = first + j * kWarp;
        if (i < words) y[row * words + i] = word[j];
      }
    }
  }
}

// Writes the rows that belong to no choice: padding, and rows whose slot has another row in the
// inverse map. A warp checks 32 rows at a time.
template <class Word>
__device__ inline void fill_rows(const Permute& task, int64_t words) {
  const auto* x = static_cast<const Word*>(task.x);
  auto* y = static_cast<Word*>(task.y);
  const TokenOfRow token_of_row{task.slots, task.tokens, task.choices};
  for (int64_t first = first_warp() * kWarp; first < task.rows; first += num_warps() * kWarp) {
    const int64_t mine = first + lane_index();
    const bool is_left = mine < task.rows && !belongs(task, mine, task.slots[mine]);
    const unsigned left = __ballot_sync(kAllLanes, is_left);
    for (int j = 0; j < kWarp; ++j) {
      if (!(left >> j & 1)) continue;
      const int64_t token = token_of_row(first + j);
      for (int64_t i = lane_index(); i < words; i += kWarp) {
        y[(first + j) * words + i] = token < 0 ? Word{} : x[token * words + i];
      }
    }
  }
}

template <class Word>
__global__ void spread_rows(Permute task, int64_t words) {
  for (int64_t token = first_warp(); token < task.tokens; token += num_warps()) {
    spread_token<Word>(task, token, words);
  }
  fill_rows<Word>(task, words);
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
