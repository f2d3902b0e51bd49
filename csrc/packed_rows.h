#pragma once

#include <cstdint>

#ifdef MOE_PARALLEL_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moe_parallel {

// A destination has `experts_there` experts: expert number n is expert n % experts_there of
// destination n / experts_there. A token visits a destination once, with its first choice there.

// destinations[t, j] = that of choice j of token t, or -1; visits[t, j] = the same for the first
// choice of the token there, and -1 for the others.
struct FindVisits {
  const int64_t* numbers;  // [tokens, choices]; negative: no expert
  int64_t* destinations;   // [tokens, choices]
  int64_t* visits;         // [tokens, choices]
  int64_t tokens;
  int64_t choices;
  int64_t experts_there;
};

// The ends of packed rows: the experts of each visit and their probs, in the order of its choices.
struct RowEnds {
  const int64_t* numbers;  // [tokens, choices]
  const int64_t* slots;    // [rows]: the first choice of the visit, negative in padding
  void* packed;            // [rows], rows row_bytes apart
  int64_t rows;
  int64_t choices;
  int64_t experts_there;
  int64_t places;
  int64_t row_bytes;
  int64_t experts_at;  // in bytes from the begin of a row
  int64_t probs_at;
  bool is_double;  // probs; otherwise float
};

// Writes the experts, -1 in an empty place, and their probs, 0 there.
struct WriteEnds {
  RowEnds ends;
  const void* probs;  // [tokens, choices / shards]
  int64_t shards;     // of an expert: adjacent choices with the same prob
};

// probs[t, j] = the prob in the row and place of the choice. Others are not written.
struct ReadEnds {
  RowEnds ends;
  void* probs;  // [tokens, choices]
};

void run_on_cpu(const FindVisits& task);
void run_on_cpu(const WriteEnds& task);
void run_on_cpu(const ReadEnds& task);
#ifdef MOE_PARALLEL_CUDA
void run_on_cuda(const FindVisits& task, cudaStream_t stream);
void run_on_cuda(const WriteEnds& task, cudaStream_t stream);
void run_on_cuda(const ReadEnds& task, cudaStream_t stream);
#endif

#ifdef __CUDACC__
#define MOE_PARALLEL_BOTH __host__ __device__
#else
#define MOE_PARALLEL_BOTH
#endif

// One choice of FindVisits.
MOE_PARALLEL_BOTH inline void find_visit(const FindVisits& task, int64_t choice) {
  const int64_t first = choice / task.choices * task.choices;
  const int64_t number = task.numbers[choice];
  const int64_t destination = number < 0 ? -1 : number / task.experts_there;
  bool is_first = number >= 0;
  for (int64_t other = first; is_first && other < choice; ++other) {
    const int64_t its = task.numbers[other];
    is_first = its < 0 || its / task.experts_there != destination;
  }
  task.destinations[choice] = destination;
  task.visits[choice] = is_first ? destination : -1;
}

// Calls visit(place, choice) for the choices of a row, and returns their number.
template <class Visit>
MOE_PARALLEL_BOTH inline int64_t walk_row(const RowEnds& ends, int64_t row, const Visit& visit) {
  const int64_t slot = ends.slots[row];
  if (slot < 0) return 0;
  const int64_t destination = ends.numbers[slot] / ends.experts_there;
  const int64_t end = (slot / ends.choices + 1) * ends.choices;
  int64_t place = 0;
  for (int64_t choice = slot; choice < end && place < ends.places; ++choice) {
    const int64_t number = ends.numbers[choice];
    if (number < 0 || number / ends.experts_there != destination) continue;
    visit(place, choice);
    ++place;
  }
  return place;
}

template <class Prob>
MOE_PARALLEL_BOTH inline void write_end(const WriteEnds& task, int64_t row) {
  const RowEnds& ends = task.ends;
  char* begin = static_cast<char*>(ends.packed) + row * ends.row_bytes;
  auto* experts = reinterpret_cast<int16_t*>(begin + ends.experts_at);
  auto* probs = reinterpret_cast<Prob*>(begin + ends.probs_at);
  const auto* given = static_cast<const Prob*>(task.probs);
  int64_t place = walk_row(ends, row, [&](int64_t here, int64_t choice) {
    experts[here] = static_cast<int16_t>(ends.numbers[choice] % ends.experts_there);
    probs[here] = given[choice / task.shards];
  });
  for (; place < ends.places; ++place) {
    experts[place] = -1;
    probs[place] = 0;
  }
}

template <class Prob>
MOE_PARALLEL_BOTH inline void read_end(const ReadEnds& task, int64_t row) {
  const RowEnds& ends = task.ends;
  const char* begin = static_cast<const char*>(ends.packed) + row * ends.row_bytes;
  const auto* probs = reinterpret_cast<const Prob*>(begin + ends.probs_at);
  walk_row(ends, row, [&](int64_t place, int64_t choice) {
    static_cast<Prob*>(task.probs)[choice] = probs[place];
  });
}

}  // namespace moe_parallel
