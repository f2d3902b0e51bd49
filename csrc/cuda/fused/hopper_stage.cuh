// What a block of the Hopper kernel holds in shared memory: stages of operands, as wgmma reads
// them.
//
// A stage is three slabs: 128 rows of a, and 128 columns of b for each accumulator, all of a depth
// of 64. A slab is 128 lines of 128 bytes. A line is
//   of a, and of b by columns:  a row, or a column, with its 64 elements of depth;
//   of b by rows:               64 columns of an element of depth; 64 lines for the first
//                               64 columns, then 64 for the others.
// The 16-byte pieces of a line are swizzled: piece p of line l is where p ^ (l % 8) would be, so
// that eight pieces across lines lie in different banks. wgmma undoes it from the bits of the
// address
// ("128-byte swizzle"), which is why a slab begins at a multiple of 1024.
#pragma once

#include "hopper_ptx.cuh"
#include "tiles.cuh"

namespace moe_parallel::fused::hopper {

constexpr int kDepth = 64;  // of a stage
constexpr int kStages = 4;

constexpr int kLines = 128, kLineBytes = 128, kPieces = 8, kPieceBytes = 16;
constexpr int kAtomBytes = 8 * kLineBytes;  // after which the swizzle comes round
constexpr int kSlabBytes = kLines * kLineBytes;
constexpr int kStageBytes = 3 * kSlabBytes;
static_assert(kLines == kTileRows && kLines == kTileColumns && kLineBytes == 2 * kDepth);

struct Barriers {
  ptx::Barrier full[kStages], empty[kStages];
};

constexpr int kSharedBytes = kStages * kStageBytes + static_cast<int>(sizeof(Barriers));

enum Slab { kA, kFirst, kSecond };

// A thread's place among the stages: the same for who fills and who reads them, all tiles through.
class Ring {
 public:
  __device__ int stage() const { return index_ % kStages; }
  // Of the phase in which the stage is filled, or emptied, this time.
  __device__ uint32_t parity() const { return index_ / kStages % 2; }
  __device__ void advance() { ++index_; }

 private:
  uint32_t index_ = 0;
};

// Addresses that the compiler knows, so that they take no registers.
__device__ inline ptx::SharedAddress slab_of(int stage, Slab slab) {
  return ptx::shared_address(ptx::shared_memory()) + stage * kStageBytes + slab * kSlabBytes;
}
__device__ inline Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(ptx::shared_memory() + kStages * kStageBytes);
}

// What wgmma is told of a matrix in shared memory: where it begins, the bytes between two of its
// parts in either direction, and the swizzle; all addresses in units of 16 bytes. The names are
// the PTX ISA's ("matrix descriptor format"):
//   stride:   from 8 lines to the next 8;
//   leading:  from 64 columns to the next 64 of b by rows; else of no meaning, and 16 by custom.
__device__ inline uint64_t describe(ptx::SharedAddress start, int leading_bytes) {
  constexpr uint64_t kSwizzle128Bytes = 1;
  return uint64_t{(start & 0x3ffff) >> 4} | uint64_t(leading_bytes >> 4) << 16 |
         uint64_t{kAtomBytes >> 4} << 32 | kSwizzle128Bytes << 62;
}

}  // namespace moe_parallel::fused::hopper
