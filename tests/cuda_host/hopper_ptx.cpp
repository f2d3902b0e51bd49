// Implements csrc/cuda/fused/hopper_ptx.cuh as the PTX ISA describes it, with everything as late as
// possible. A product is computed when it is waited for, from the content of shared memory at that
// time. Copies end when no thread can continue without them. So a stage that is read too early or
// written too early gives NaN.
#include "cuda/fused/hopper_ptx.cuh"

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <vector>

using namespace moe_parallel;

namespace {

constexpr int kMostThreads = 1024;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "cuda_host: %s\n", what);
  std::abort();
}

// The content of the 64 bits of an mbarrier.
struct State {
  uint32_t expected : 20, pending : 20, parity : 1;
};
static_assert(sizeof(State) <= sizeof(ptx::Barrier));

State state_of(const ptx::Barrier& barrier) {
  State state;
  std::memcpy(&state, &barrier, sizeof(state));
  return state;
}

void arrive_at(ptx::Barrier& barrier) {
  State state = state_of(barrier);
  if (state.expected == 0) fail("a thread arrives at a barrier that was not made");
  if (--state.pending == 0) {
    state.pending = state.expected;
    state.parity ^= 1;
  }
  std::memcpy(&barrier, &state, sizeof(state));
}

// A thread's arrival, and the barrier at which it is announced. It follows a group of the thread's
// copies and all groups before it.
struct Arrival {
  unsigned thread;
  ptx::Barrier* barrier;
};
std::deque<Arrival> arrivals;

struct Product {
  float (*d)[4];
  int columns;
  uint64_t a, b;
  bool by_columns;
  float (*to_float)(uint16_t);
  uint64_t fenced;  // copies delivered by then are ordered before the product
};

// A thread's products: those that are not committed yet, and the groups in flight.
struct Products {
  bool has_begun = false;
  uint64_t fenced = 0;
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
};
std::array<Products, kMostThreads> products_of_threads;

Products& mine() { return products_of_threads[threadIdx.x]; }

// A matrix in shared memory, as the PTX ISA lays it out for wgmma with 128-byte swizzle. `across`
// is an index along m or n. If by_depth, each line of 128 bytes has one row or column, and the next
// eight lines are `stride` bytes further. Otherwise each line has 64 rows or columns at one k. The
// next eight k are then `stride` bytes further, and the next 64 rows or columns are `leading` bytes
// further.
class Matrix {
 public:
  explicit Matrix(uint64_t descriptor) : descriptor_(descriptor) {
    if (descriptor >> 62 != 1) fail("a matrix without 128-byte swizzle");
    if (descriptor >> 49 & 7) fail("a matrix with a base offset");
  }

  uint16_t at(int across, int k, bool by_depth, uint64_t fenced) const {
    const uint32_t offset =
        by_depth ? across / 8 * field(32) + across % 8 * 128 + 2 * k
                 : across / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + across % 64 * 2;
    const uint32_t line_wise = field(0) + offset;
    const uint32_t address = line_wise ^ (line_wise >> 7 & 7) << 4;
    if (address + 2 > cuda_host::shared_bytes()) fail("a matrix beyond shared memory");
    if (cuda_host::delivered_at(address) > fenced) {
      fail("wgmma reads what was copied since the thread's last fence.proxy.async");
    }
    uint16_t x;
    std::memcpy(&x, ptx::shared_memory() + address, sizeof(x));
    return x;
  }

 private:
  // A field of 14 bits of the descriptor, which omits the four lowest bits of its value.
  uint32_t field(int bit) const { return (descriptor_ >> bit & 0x3fff) << 4; }

  uint64_t descriptor_;
};

// Computes a lane's part of the product of its warpgroup.
void compute(const Product& product) {
  const Matrix a(product.a), b(product.b);
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = cuda_host::lane();
  const int row = 16 * warp + lane / 4;
  float x[2][16];
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 2; ++i) {
      x[i][k] = product.to_float(a.at(row + 8 * i, k, /*by_depth=*/true, product.fenced));
    }
  }
  for (int group = 0; group < product.columns / 8; ++group) {
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * group + lane % 4 * 2 + i;
      for (int k = 0; k < 16; ++k) {
        const float y = product.to_float(b.at(column, k, product.by_columns, product.fenced));
        product.d[group][i] += x[0][k] * y;
        product.d[group][2 + i] += x[1][k] * y;
      }
    }
  }
}

template <class Scalar>
float to_float(uint16_t bits);
template <>
float to_float<__nv_bfloat16>(uint16_t bits) {
  return __bfloat162float({bits});
}
template <>
float to_float<__half>(uint16_t bits) {
  __half x;
  std::memcpy(&x, &bits, sizeof(x));
  return __half2float(x);
}

}  // namespace

namespace cuda_host {

// The copies of one thread end in order, those of different threads in any order.
bool deliver_a_copy() {
  static std::minstd_rand random;
  if (arrivals.empty()) return false;
  const unsigned thread = arrivals[random() % arrivals.size()].thread;
  const auto is_its = [&](const Arrival& arrival) { return arrival.thread == thread; };
  const auto first = std::find_if(arrivals.begin(), arrivals.end(), is_its);
  const auto left = std::count_if(first, arrivals.end(), is_its) - 1;
  threadIdx.x = thread;
  ptx::wait_for_copies(static_cast<int>(left));
  arrive_at(*first->barrier);
  arrivals.erase(first);
  return true;
}

void expect_nothing_under_way() {
  for (const Products& products : products_of_threads) {
    if (!products.open.empty() || !products.groups.empty())
      fail("a block ended before its products");
  }
}

}  // namespace cuda_host

namespace moe_parallel::ptx {

void make_barrier(Barrier& barrier, int arrivals) {
  const auto count = static_cast<uint32_t>(arrivals);
  const State state{.expected = count, .pending = count, .parity = 0};
  std::memcpy(&barrier, &state, sizeof(state));
}

void arrive(Barrier& barrier) { arrive_at(barrier); }

void wait(Barrier& barrier, uint32_t parity) {
  cuda_host::wait_until([&] { return state_of(barrier).parity != parity; });
}

void arrive_after_copies(Barrier& barrier) {
  commit_copies();
  arrivals.push_back({threadIdx.x, &barrier});
}

void wait_for_all_copies() {
  cuda_host::wait_until([me = threadIdx.x] {
    return std::none_of(arrivals.begin(), arrivals.end(),
                        [me](const Arrival& arrival) { return arrival.thread == me; });
  });
  commit_copies();
  wait_for_copies(0);
}

void order_copies_before_wgmma() { mine().fenced = cuda_host::now(); }

void begin_wgmma() { mine().has_begun = true; }

void wgmma(float (*d)[4], int columns, uint64_t a, uint64_t b, bool by_columns, __nv_bfloat16) {
  mine().open.push_back({d, columns, a, b, by_columns, to_float<__nv_bfloat16>, mine().fenced});
}
void wgmma(float (*d)[4], int columns, uint64_t a, uint64_t b, bool by_columns, __half) {
  mine().open.push_back({d, columns, a, b, by_columns, to_float<__half>, mine().fenced});
}

void commit_wgmma() {
  if (!mine().has_begun) fail("products without a wgmma.fence before them");
  mine().has_begun = false;
  mine().groups.push_back(std::move(mine().open));
  mine().open.clear();
  // "sync.aligned": all lanes execute it, at the same place.
  for (uint64_t count : cuda_host::exchange(mine().groups.size())) {
    if (count != mine().groups.size()) fail("lanes of a warp at different products");
  }
}

void wait_for_wgmma(int left) {
  auto& groups = mine().groups;
  for (; static_cast<int>(groups.size()) > left; groups.pop_front()) {
    for (const Product& product : groups.front()) compute(product);
  }
}

}  // namespace moe_parallel::ptx
