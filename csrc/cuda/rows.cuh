// Copies of complete rows of any element type.
#pragma once

#include "launch.cuh"
#include "vector.cuh"

namespace moe_parallel {

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

}  // namespace moe_parallel
