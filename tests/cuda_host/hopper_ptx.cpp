// Implements csrc/cuda/hopper_ptx.cuh as the PTX ISA describes it, with everything as late as
// possible. Copies end when no thread can continue without them, and until then their destination
// holds NaN. A product is computed when it is waited for, from the content of shared memory at that
// time. So a stage that is read too early or written too early gives NaN.
#include "cuda/hopper_ptx.cuh"

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <vector>

using namespace moe_parallel;

namespace {

constexpr std::size_t kSharedBytes = 227 << 10;
constexpr int kMostThreads = 1024;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "cuda_host: %s\n", what);
  std::abort();
}

alignas(1024) char memory[kSharedBytes];

constexpr uint64_t kUnderWay = ~uint64_t{0};
std::array<uint64_t, kSharedBytes / 16> deliveries;  // the time for each 16 bytes
uint64_t now = 0;

// 16 bytes of the shared memory that the kernel was launched with.
char* vector_at(ptx::SharedAddress address) {
  if (address % 16 != 0 || address + 16 > cuda_host::shared_bytes()) {
    fail("shared memory has no such vector");
  }
  return memory + address;
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

// A copy of 16 bytes, or of zeros; or what follows the copies before it: the thread's arrival.
struct Copy {
  ptx::SharedAddress to;
  const void* from;       // null: zeros
  ptx::Barrier* arrival;  // null: a copy
};
std::array<std::deque<Copy>, kMostThreads> copies_of_threads;
std::vector<unsigned> arriving;  // the threads of arrivals that are under way

void deliver(const Copy& copy) {
  deliveries[copy.to / 16] = ++now;
  if (copy.from) {
    std::memcpy(vector_at(copy.to), copy.from, 16);
  } else {
    std::memset(vector_at(copy.to), 0, 16);
  }
}

template <class Scalar>
float to_float(uint32_t bits) {
  const auto scalar = std::bit_cast<Scalar>(static_cast<uint16_t>(bits));
  if constexpr (std::is_same_v<Scalar, __half>) {
    return __half2float(scalar);
  } else {
    return __bfloat162float(scalar);
  }
}

struct Product {
  ptx::Sums* sums;
  uint64_t a, b;
  float (*to_float)(uint32_t);
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

// A matrix in shared memory, as the PTX ISA lays it out for wgmma with 128-byte swizzle: lines of
// 128 bytes, of which eight form an atom. `stride` bytes are between two atoms.
class Matrix {
 public:
  Matrix(uint64_t descriptor, uint64_t fenced) : descriptor_(descriptor), fenced_(fenced) {
    if (descriptor >> 62 != 1) fail("a matrix without 128-byte swizzle");
    if (descriptor >> 49 & 7) fail("a matrix with a base offset");
  }

  // Columns k and k + 1 of a row of a: a line is a row.
  uint32_t of_row(int row, int k) const { return at(place(row) + 2 * k); }

  // Columns `column` and `column` + 1 of row k of b: a line is 64 columns of a row. The next 64
  // columns are `leading` bytes further.
  uint32_t of_columns(int column, int k) const {
    return at(column / 64 * field(16) + place(k) + column % 64 * 2);
  }

 private:
  // A field of 14 bits of the descriptor, which omits the four lowest bits of its value.
  uint32_t field(int bit) const { return (descriptor_ >> bit & 0x3fff) << 4; }
  uint32_t place(int line) const { return line / 8 * field(32) + line % 8 * 128; }

  uint32_t at(uint32_t offset) const {
    const uint32_t line_wise = field(0) + offset;
    const uint32_t address = line_wise ^ (line_wise >> 7 & 7) << 4;
    if (address + 4 > cuda_host::shared_bytes()) fail("a matrix beyond shared memory");
    if (deliveries[address / 16] > fenced_) {
      fail("wgmma reads what was copied since the thread's last fence.proxy.async");
    }
    uint32_t pair;
    std::memcpy(&pair, memory + address, sizeof(pair));
    return pair;
  }

  uint64_t descriptor_, fenced_;
};

// Computes a lane's part of the product of its warpgroup.
void compute(const Product& product) {
  const Matrix a(product.a, product.fenced), b(product.b, product.fenced);
  const auto to_float = product.to_float;
  const int lane = cuda_host::lane();
  const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
  float x[2][16];
  for (int k = 0; k < 16; k += 2) {
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = a.of_row(row + 8 * i, k);
      x[i][k] = to_float(pair), x[i][k + 1] = to_float(pair >> 16);
    }
  }
  for (int group = 0; group < 32; ++group) {
    float* d = (*product.sums)[group];
    for (int k = 0; k < 16; ++k) {
      const uint32_t pair = b.of_columns(8 * group + lane % 4 * 2, k);
      const float y[] = {to_float(pair), to_float(pair >> 16)};
      for (int i = 0; i < 4; ++i) d[i] += x[i / 2][k] * y[i % 2];
    }
  }
}

template <class Scalar>
void add_product(ptx::Sums& sums, uint64_t a, uint64_t b) {
  mine().open.push_back({&sums, a, b, to_float<Scalar>, mine().fenced});
}

}  // namespace

namespace cuda_host {

void begin_block() {
  std::memset(memory, 0xff, sizeof(memory));
  deliveries.fill(0);
}

void expect_no_copies_under_way() {
  if (!copies_of_threads[threadIdx.x].empty()) fail("a thread ended before its copies");
}

void expect_no_products_under_way() {
  for (const Products& products : products_of_threads) {
    if (!products.open.empty() || !products.groups.empty()) {
      fail("a block ended before its products");
    }
  }
}

// The copies of one thread end in order, those of different threads in any order.
bool deliver_a_copy() {
  static std::minstd_rand random;
  if (arriving.empty()) return false;
  unsigned& chosen = arriving[random() % arriving.size()];
  auto& copies = copies_of_threads[chosen];
  chosen = arriving.back();
  arriving.pop_back();
  for (; !copies.front().arrival; copies.pop_front()) deliver(copies.front());
  arrive_at(*copies.front().arrival);
  copies.pop_front();
  return true;
}

}  // namespace cuda_host

namespace moe_parallel::ptx {

char* shared_memory() { return memory; }

SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(static_cast<const char*>(pointer) - memory);
}

void copy_async(SharedAddress to, const void* from, bool is_there) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    fail("cp.async from an address that is not a multiple of 16");
  }
  // An invalid address ends the process, even if nothing is copied from it.
  static_cast<void>(*static_cast<const volatile char*>(from));
  std::memset(vector_at(to), 0xff, 16);
  deliveries[to / 16] = kUnderWay;
  copies_of_threads[threadIdx.x].push_back({to, is_there ? from : nullptr, nullptr});
}

void arrive_after_copies(Barrier& barrier) {
  copies_of_threads[threadIdx.x].push_back({0, nullptr, &barrier});
  arriving.push_back(threadIdx.x);
}

void wait_for_all_copies() {
  auto& copies = copies_of_threads[threadIdx.x];
  const auto is_arrival = [](const Copy& copy) { return copy.arrival != nullptr; };
  cuda_host::wait_until([&] { return std::none_of(copies.begin(), copies.end(), is_arrival); });
  for (; !copies.empty(); copies.pop_front()) deliver(copies.front());
}

void store_vector(void* to, const uint32_t (&x)[4]) {
  *static_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
}

uint32_t round_pair(float x, float y, __nv_bfloat16) {
  return __float2bfloat16_rn(x).bits | uint32_t{__float2bfloat16_rn(y).bits} << 16;
}
uint32_t round_pair(float x, float y, __half) {
  return std::bit_cast<uint16_t>(__float2half_rn(x)) |
         uint32_t{std::bit_cast<uint16_t>(__float2half_rn(y))} << 16;
}

void make_barrier(Barrier& barrier, int arrivals) {
  const auto count = static_cast<uint32_t>(arrivals);
  const State state{.expected = count, .pending = count, .parity = 0};
  std::memcpy(&barrier, &state, sizeof(state));
}

void arrive(Barrier& barrier) { arrive_at(barrier); }

void wait(Barrier& barrier, uint32_t parity) {
  cuda_host::wait_until([&] { return state_of(barrier).parity != parity; });
}

void order_copies_before_wgmma() { mine().fenced = ++now; }

void begin_wgmma() { mine().has_begun = true; }

void wgmma(Sums& d, uint64_t a, uint64_t b, __nv_bfloat16) { add_product<__nv_bfloat16>(d, a, b); }
void wgmma(Sums& d, uint64_t a, uint64_t b, __half) { add_product<__half>(d, a, b); }

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
