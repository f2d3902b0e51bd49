#include "../permute.h"
#include "launch.cuh"
#include "vector.cuh"

namespace moe_parallel {
namespace {

constexpr int kWordsInFlight = 4;
constexpr int kRowsInFlight = 4;  // rows of a warp at a time, so that their loads overlap

// Calls body(Word{}) with the widest word whose size divides the addresses and the distances, which
// are in bytes. uint16_t always fits, because every element type has an even size.
template <class Body>
void with_words(std::initializer_list<const void*> addresses,
                std::initializer_list<int64_t> distances, const Body& body) {
  const auto takes = [&](int64_t bytes) { return are_aligned(addresses, distances, 1, bytes); };
  if (takes(sizeof(uint4))) {
    body(uint4{});
  } else if (takes(sizeof(uint32_t))) {
    body(uint32_t{});
  } else {
    body(uint16_t{});
  }
}

// The rows of a matrix, `words` words each and `stride` words apart.
template <class Word>
struct WordRows {
  Word* data;
  int64_t words;
  int64_t stride;

  __device__ Word* operator[](int64_t row) const { return data + row * stride; }
};

// y[n] = x[row_of(n)], or zeros if row_of(n) < 0.
template <class Word, class RowOf>
__global__ void gather_rows(WordRows<const Word> x, WordRows<Word> y, int64_t rows, RowOf row_of) {
  for (int64_t first = first_warp() * kRowsInFlight; first < rows;
       first += num_warps() * kRowsInFlight) {
    int64_t source[kRowsInFlight];
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) source[j] = first + j < rows ? row_of(first + j) : -1;
    for (int64_t i = lane_index(); i < y.words; i += kWarp) {
      Word word[kRowsInFlight];
#pragma unroll
      for (int j = 0; j < kRowsInFlight; ++j) {
        word[j] = source[j] < 0 ? Word{} : x[source[j]][i];
      }
#pragma unroll
      for (int j = 0; j < kRowsInFlight; ++j) {
        if (first + j < rows) y[first + j][i] = word[j];
      }
    }
  }
}

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
__device__ inline void spread_token(const Permute& task, int64_t token, WordRows<const Word> x,
                                    WordRows<Word> y) {
  for (int64_t first = lane_index(); first < x.words; first += kWordsInFlight * kWarp) {
    Word word[kWordsInFlight];
#pragma unroll
    for (int j = 0; j < kWordsInFlight; ++j) {
      if (first + j * kWarp < x.words) word[j] = x[token][first + j * kWarp];
    }
    for (int64_t k = 0; k < task.choices; ++k) {
      const int64_t choice = token * task.choices + k, row = task.row_of_choice[choice];
      if (!belongs(task, row, choice)) continue;
#pragma unroll
      for (int j = 0; j < kWordsInFlight; ++j) {
        const int64_t i = first + j * kWarp;
        if (i < x.words) y[row][i] = word[j];
      }
    }
  }
}

// Writes the rows that belong to no choice: padding, and rows whose slot has another row in the
// inverse map. A warp checks 32 rows at a time.
template <class Word>
__device__ inline void fill_rows(const Permute& task, WordRows<const Word> x, WordRows<Word> y) {
  const TokenOfRow token_of_row{task.slots, task.tokens, task.choices};
  for (int64_t first = first_warp() * kWarp; first < task.rows; first += num_warps() * kWarp) {
    const int64_t mine = first + lane_index();
    const bool is_left = mine < task.rows && !belongs(task, mine, task.slots[mine]);
    const unsigned left = __ballot_sync(kAllLanes, is_left);
    for (int j = 0; j < kWarp; ++j) {
      if (!(left >> j & 1)) continue;
      const int64_t token = token_of_row(first + j);
      for (int64_t i = lane_index(); i < y.words; i += kWarp) {
        y[first + j][i] = token < 0 ? Word{} : x[token][i];
      }
    }
  }
}

template <class Word>
__global__ void spread_rows(Permute task, WordRows<const Word> x, WordRows<Word> y) {
  for (int64_t token = first_warp(); token < task.tokens; token += num_warps()) {
    spread_token(task, token, x, y);
  }
  fill_rows(task, x, y);
}

}  // namespace

void run_on_cuda(const Permute& task, cudaStream_t stream) {
  if (task.rows == 0 || task.row_bytes == 0) return;
  with_words({task.x, task.y}, {task.row_bytes, task.x_stride, task.y_stride}, [&](auto word) {
    using Word = decltype(word);
    constexpr auto kBytes = static_cast<int64_t>(sizeof(Word));
    const int64_t words = task.row_bytes / kBytes;
    const WordRows<const Word> x{static_cast<const Word*>(task.x), words, task.x_stride / kBytes};
    const WordRows<Word> y{static_cast<Word*>(task.y), words, task.y_stride / kBytes};
    if (task.row_of_choice && task.choices > 1) {
      const int64_t warps = std::max(task.tokens, (task.rows + kWarp - 1) / kWarp);
      launch_kernel(spread_rows<Word>, blocks_for(warps, kWarpsPerBlock), stream, task, x, y);
      return;
    }
    const TokenOfRow token_of_row{task.slots, task.tokens, task.choices};
    launch_kernel(gather_rows<Word, TokenOfRow>,
                  blocks_for(task.rows, kWarpsPerBlock * kRowsInFlight), stream, x, y, task.rows,
                  token_of_row);
  });
}

}  // namespace moe_parallel
