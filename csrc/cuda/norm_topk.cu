// The selection and its gradient. One kernel does everything that needs C, because C is then still
// in the L2 cache. A team of threads per token writes the token's norms, ranks them, and copies the
// C of the chosen experts.
#include "../norm_topk.h"
#include "reduce.cuh"
#include "vector.cuh"

namespace moe_parallel {
namespace {

constexpr int64_t kBytesOfWarp = 4096;  // of C; a token with more gets a block, not a warp

// Synchronizes the threads of a token, so that they see what the others wrote.
template <int kWarps>
__device__ inline void wait_for_team() {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// `lanes` lanes per norm. The lanes of a warp stay together to the end, because they add up their
// sums.
template <class Scalar, int kSize>
__device__ inline void write_norms(const ScoreTokens& task, int64_t token, int thread, int team,
                                   int lanes) {
  using Sum = sum_t<Scalar>;
  const auto* c = static_cast<const Scalar*>(task.c_TER) + token * task.num_experts * task.rank;
  auto* norms = static_cast<Sum*>(task.norms) + token * task.num_experts;
  const int experts_of_warp = kWarp / lanes;
  for (int64_t first = thread / kWarp * experts_of_warp; first < task.num_experts;
       first += team / lanes) {
    const int64_t expert = first + lane_index() / lanes;
    Sum sum = 0;
    if (expert < task.num_experts) {
#pragma unroll 2
      for (int64_t i = lane_index() % lanes; i < task.rank / kSize; i += lanes) {
        const auto x = load<Scalar, kSize>(c + expert * task.rank, i);
        sum += dot(x, x);
      }
    }
    sum = sum_over_lanes(sum, lanes);
    if (expert < task.num_experts && lane_index() % lanes == 0) norms[expert] = sqrt(sum);
  }
}

// One thread per norm.
template <class Sum>
__device__ inline void add_squares(const ScoreTokens& task, int64_t token, int thread, int team) {
  auto* norms = static_cast<Sum*>(task.norms) + token * task.num_experts;
  for (int64_t expert = thread; expert < task.num_experts; expert += team) {
    const int64_t squares_per_norm = task.rank / kColumnsOfSquares;
    const float* squares = task.squares + (token * task.num_experts + expert) * squares_per_norm;
    Sum sum = 0;
    for (int64_t i = 0; i < squares_per_norm; ++i) sum += squares[i];
    norms[expert] = sqrt(sum);
  }
}

// Whether p comes before q in descending order. The order is total: NaN counts as the largest, as
// in torch.sort, and in a tie the lower index comes first.
template <class Norm>
__device__ inline bool ranks_before(Norm p, int64_t p_index, Norm q, int64_t q_index) {
  const bool p_is_nan = p != p;
  const bool q_is_nan = q != q;
  if (p_is_nan != q_is_nan) return p_is_nan;
  if (!p_is_nan && p != q) return p > q;
  return p_index < q_index;
}

template <class Norm>
struct Candidate {
  Norm score;
  int64_t expert;  // -1: none
};

template <class Norm>
__device__ inline bool leads(const Candidate<Norm>& p, const Candidate<Norm>& q) {
  if (p.expert < 0 || q.expert < 0) return p.expert >= 0;
  return ranks_before(p.score, p.expert, q.score, q.expert);
}

// The first of the candidates of all lanes, in the order of leads(). Every lane holds it.
template <class Norm>
__device__ inline Candidate<Norm> first_of_lanes(Candidate<Norm> best) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Candidate<Norm> other{__shfl_xor_sync(kAllLanes, best.score, offset),
                                __shfl_xor_sync(kAllLanes, best.expert, offset)};
    if (leads(other, best)) best = other;
  }
  return best;
}

// Runs on one warp. Each lane handles every 32nd expert. The scores of a lane's first kInRegisters
// experts stay in registers, and the others are read again for each choice. A choice is the first
// expert in order that comes after the previous choice.
template <class Norm>
__device__ inline void write_choices(const ScoreTokens& task, int64_t token) {
  constexpr int kInRegisters = 4;
  const auto* norms = static_cast<const Norm*>(task.norms) + token * task.num_experts;
  const auto* bias = static_cast<const Norm*>(task.bias);
  const auto candidate_of = [&](int64_t e) -> Candidate<Norm> {
    if (e >= task.num_experts) return {Norm{0}, -1};
    return {bias ? norms[e] + bias[e] : norms[e], e};
  };
  Candidate<Norm> near[kInRegisters];
#pragma unroll
  for (int i = 0; i < kInRegisters; ++i) near[i] = candidate_of(lane_index() + i * kWarp);
  Candidate<Norm> last{Norm{0}, -1};
  for (int64_t j = 0; j < task.k; ++j) {
    Candidate<Norm> best{Norm{0}, -1};
    const auto consider = [&](const Candidate<Norm>& candidate) {
      if ((j == 0 || leads(last, candidate)) && leads(candidate, best)) best = candidate;
    };
#pragma unroll
    for (int i = 0; i < kInRegisters; ++i) consider(near[i]);
    for (int64_t e = lane_index() + kInRegisters * kWarp; e < task.num_experts; e += kWarp) {
      consider(candidate_of(e));
    }
    last = first_of_lanes(best);
    if (lane_index() == 0) task.experts[token * task.k + j] = last.expert;
  }
}

template <class Scalar, int kSize>
__device__ inline void pick_chosen(const ScoreTokens& task, int64_t token, int thread, int team) {
  const auto* c = static_cast<const Scalar*>(task.c_TER) + token * task.num_experts * task.rank;
  auto* c_TKR = static_cast<Scalar*>(task.c_TKR) + token * task.k * task.rank;
  const int64_t vectors = task.rank / kSize;
  for (int64_t i = thread; i < task.k * vectors; i += team) {
    const int64_t expert = task.experts[token * task.k + i / vectors];
    store(load<Scalar, kSize>(c + expert * task.rank, i % vectors), c_TKR, i);
  }
}

template <class Scalar, int kSize, int kWarps>
__global__ void score_tokens(ScoreTokens task, int lanes) {
  constexpr int kTeam = kWarps * kWarp;
  const int thread = static_cast<int>(threadIdx.x) % kTeam;
  for (int64_t token = first_thread() / kTeam; token < task.tokens;
       token += num_threads() / kTeam) {
    if (task.squares) {
      add_squares<sum_t<Scalar>>(task, token, thread, kTeam);
    } else {
      write_norms<Scalar, kSize>(task, token, thread, kTeam, lanes);
    }
    wait_for_team<kWarps>();
    if (thread < kWarp) write_choices<sum_t<Scalar>>(task, token);
    if (!task.c_TKR) continue;
    wait_for_team<kWarps>();
    pick_chosen<Scalar, kSize>(task, token, thread, kTeam);
  }
}

// The row of dc_TKR that belongs to a group, or -1.
__device__ inline int64_t chosen_row(const NormGradient& task, int64_t group) {
  const int64_t token = group / task.num_experts, expert = group % task.num_experts;
  int64_t row = -1;
  for (int64_t choice = token * task.k; choice < (token + 1) * task.k; ++choice) {
    if (task.experts[choice] == expert) row = choice;
  }
  return row;
}

// Computes dc with `lanes` lanes per group. Every element is read by the lane that writes it,
// because dc and c may be the same memory.
template <class Scalar, int kSize>
__global__ void norm_gradient(NormGradient task, int lanes) {
  using Sum = sum_t<Scalar>;
  const auto* c = static_cast<const Scalar*>(task.c_TER);
  const auto* dc_TKR = static_cast<const Scalar*>(task.dc_TKR);
  auto* dc = static_cast<Scalar*>(task.dc_TER);
  const int64_t groups = task.tokens * task.num_experts;
  const int64_t stride = num_threads() / lanes;
  for (int64_t group = first_thread() / lanes; group < groups; group += stride) {
    const Sum factor = static_cast<const Sum*>(task.factors)[group];
    const int64_t row = dc_TKR ? chosen_row(task, group) : -1;
#pragma unroll 2
    for (int64_t i = lane_index() % lanes; i < task.rank / kSize; i += lanes) {
      Sum sums[kSize] = {};
      add_scaled(load<Scalar, kSize>(c + group * task.rank, i), factor, sums);
      if (row >= 0) add_scaled(load<Scalar, kSize>(dc_TKR + row * task.rank, i), Sum{1}, sums);
      store(round_to<Scalar>(sums), dc + group * task.rank, i);
    }
  }
}

}  // namespace

void run_on_cuda(const ScoreTokens& task, cudaStream_t stream) {
  if (task.tokens == 0) return;
  with_vectors(task.type, {task.c_TER, task.c_TKR}, {task.rank}, [&](auto scalar, auto size) {
    using Scalar = decltype(scalar);
    const int lanes = lanes_for(task.rank / size());
    if (task.squares || task.num_experts * task.row_bytes <= kBytesOfWarp) {
      launch_kernel(score_tokens<Scalar, size(), 1>, blocks_for(task.tokens, kWarpsPerBlock),
                    stream, task, lanes);
    } else {
      launch_kernel(score_tokens<Scalar, size(), kWarpsPerBlock>, blocks_for(task.tokens, 1),
                    stream, task, lanes);
    }
  });
}

void run_on_cuda(const NormGradient& task, cudaStream_t stream) {
  const int64_t groups = task.tokens * task.num_experts;
  if (groups == 0 || task.rank == 0) return;
  with_vectors(task.type, {task.c_TER, task.dc_TKR, task.dc_TER}, {task.rank},
               [&](auto scalar, auto size) {
                 const int lanes = lanes_for(task.rank / size());
                 launch_kernel(norm_gradient<decltype(scalar), size()>,
                               blocks_for(groups, kThreads / lanes), stream, task, lanes);
               });
}

}  // namespace moe_parallel
