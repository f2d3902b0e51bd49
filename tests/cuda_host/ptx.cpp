// Implements csrc/cuda/fused/ptx.cuh as the PTX ISA describes it. A copy arrives when it is waited
// for and not before. Until then its destination holds NaN.
#include "cuda/fused/ptx.cuh"

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

using namespace moe_parallel;

namespace {

constexpr std::size_t kSharedBytes = 227 << 10;  // sm_90 has the most
constexpr int kMostThreads = 1024;

alignas(1024) char memory[kSharedBytes];

struct Copy {
  ptx::SharedAddress to;
  const void* from;  // null: zeros
};

// The groups of one thread that may be in flight. The last one is not yet committed.
using Groups = std::deque<std::vector<Copy>>;
std::array<Groups, kMostThreads> groups_of_threads;

constexpr uint64_t kUnderWay = ~uint64_t{0};
std::array<uint64_t, kSharedBytes / 16> deliveries;  // the time for each 16 bytes
uint64_t clock_of_copies = 0;

Groups& groups() {
  auto& mine = groups_of_threads[threadIdx.x];
  if (mine.empty()) mine.emplace_back();
  return mine;
}

// 16 bytes of the shared memory that the kernel was launched with.
char* vector_at(ptx::SharedAddress address) {
  if (address % 16 != 0 || address + 16 > cuda_host::shared_bytes()) {
    std::fprintf(stderr, "cuda_host: shared memory has no vector at %u\n", address);
    std::abort();
  }
  return memory + address;
}

int64_t conflicts = 0;

// The eight rows of a matrix are read at once if no two of them are in the same banks.
void count_conflicts(const std::array<cuda_host::Words, cuda_host::kWarp>& rows) {
  for (int first = 0; first < cuda_host::kWarp; first += 8) {
    unsigned banks = 0;
    for (int i = first; i < first + 8; ++i) banks |= 1u << rows[i][0] / 16 % 8;
    conflicts += banks != 0xff;
  }
}

uint16_t half_word(ptx::SharedAddress row, int index) {
  uint16_t x;
  std::memcpy(&x, vector_at(row) + 2 * index, sizeof(x));
  return x;
}

float to_float(uint16_t bits, __nv_bfloat16) { return __bfloat162float({bits}); }
float to_float(uint16_t bits, __half) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }

template <class Scalar>
void multiply_halves(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     Scalar scalar) {
  const auto words = cuda_host::exchange_words({a[0], a[1], a[2], a[3], b0, b1});
  const auto part = [&](uint32_t pair, int index) {
    return to_float(static_cast<uint16_t>(pair >> 16 * index), scalar);
  };
  const int r = cuda_host::lane() / 4, q = cuda_host::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = r + i / 2 * 8, column = 2 * q + i % 2;
    for (int k = 0; k < 16; ++k) {
      const auto& of_a = words[4 * (row % 8) + k % 8 / 2];
      const auto& of_b = words[4 * column + k % 8 / 2];
      d[i] += part(of_a[row / 8 + k / 8 * 2], k % 2) * part(of_b[4 + k / 8], k % 2);
    }
  }
}

}  // namespace

namespace cuda_host {

void forget_copies() {
  for (auto& groups : groups_of_threads) groups.clear();
  std::memset(memory, 0xff, sizeof(memory));
  deliveries.fill(0);
}

void expect_no_copies_under_way() {
  for (const auto& group : groups()) {
    if (group.empty()) continue;
    std::fputs("cuda_host: a thread ended before its copies\n", stderr);
    std::abort();
  }
}

uint64_t delivered_at(uint32_t address) { return deliveries[address / 16]; }
uint64_t now() { return ++clock_of_copies; }

}  // namespace cuda_host

namespace moe_parallel::ptx {

char* shared_memory() { return memory; }

SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(static_cast<const char*>(pointer) - memory);
}

void copy_async(SharedAddress to, const void* from, bool is_there) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    std::fputs("cuda_host: cp.async from an address that is not a multiple of 16\n", stderr);
    std::abort();
  }
  // An invalid address ends the process, even if nothing is copied from it.
  static_cast<void>(*static_cast<const volatile char*>(from));
  std::memset(vector_at(to), 0xff, 16);
  deliveries[to / 16] = kUnderWay;
  groups().back().push_back({to, is_there ? from : nullptr});
}

void commit_copies() { groups().emplace_back(); }

void wait_for_copies(int left) {
  auto& mine = groups();
  for (; static_cast<int>(mine.size()) - 1 > left; mine.pop_front()) {
    for (const auto& [to, from] : mine.front()) {
      deliveries[to / 16] = cuda_host::now();
      if (from) {
        std::memcpy(vector_at(to), from, 16);
      } else {
        std::memset(vector_at(to), 0, 16);
      }
    }
  }
}

void load_matrices(SharedAddress row, uint32_t (&x)[4]) {
  const auto rows = cuda_host::exchange_words({row});
  count_conflicts(rows);
  const int r = cuda_host::lane() / 4, q = cuda_host::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const SharedAddress from = rows[8 * i + r][0];
    x[i] = half_word(from, 2 * q) | uint32_t{half_word(from, 2 * q + 1)} << 16;
  }
}

void load_transposed(SharedAddress row, uint32_t (&x)[4]) {
  const auto rows = cuda_host::exchange_words({row});
  count_conflicts(rows);
  const int r = cuda_host::lane() / 4, q = cuda_host::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    x[i] = half_word(rows[8 * i + 2 * q][0], r) | uint32_t{half_word(rows[8 * i + 2 * q + 1][0], r)}
                                                      << 16;
  }
}

void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16 type) {
  multiply_halves(d, a, b0, b1, type);
}
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half type) {
  multiply_halves(d, a, b0, b1, type);
}

void store_vector(void* to, const uint32_t (&x)[4]) {
  *static_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
}

uint32_t round_pair(float x, float y, __nv_bfloat16) {
  return __float2bfloat16_rn(x).bits | uint32_t{__float2bfloat16_rn(y).bits} << 16;
}
uint32_t round_pair(float x, float y, __half) {
  return std::bit_cast<uint16_t>(__float2half_rn(x)) |
         uint32_t{std::bit_cast<uint16_t>(__float2half_rn(y))} << 16;
}

}  // namespace moe_parallel::ptx

extern "C" int64_t bank_conflicts() { return conflicts; }
