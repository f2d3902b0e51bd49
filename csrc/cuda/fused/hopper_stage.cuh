// The shared memory of a block of the Hopper kernel: stages of operands, in the layout that wgmma
// reads.
//
// A stage has three slabs: 128 rows of a, and 128 columns of b for each accumulator, all with a
// depth of 64. A slab has 128 lines of 128 bytes. A line holds
//   of a, and of a column-major b:  one row, or column, with its 64 elements of depth;
//   of a row-major b:               64 columns at one depth. The first 64 lines hold the first 64
//                                   columns, and the other 64 lines hold the others.
// The 16-byte pieces of a line are swizzled: piece p of line l is at the place of piece
// p ^ (l % 8), so that the same piece of eight consecutive lines is in eight different banks. wgmma
// undoes this from the bits of the address ("128-byte swizzle"), which is why a slab begins at a
// multiple of 1024.
#pragma once

#include "hopper_ptx.cuh"
#include "tiles.cuh"

namespace moe_parallel::fused::hopper {

constexpr int kDepth = 64;  // of a stage
constexpr int kStages = 4;

constexpr int kLines = 128, kLineBytes = 128, kPieces = 8, kPieceBytes = 16;
constexpr int kAtomBytes = 8 * kLineBytes;  // after which the swizzle repeats
constexpr int kSlabBytes = kLines * kLineBytes;
constexpr int kStageBytes = 3 * kSlabBytes;
static_assert(kLines == kTileRows && kLines == kTileColumns && kLineBytes == 2 * kDepth);

struct Barriers {
  ptx::Barrier full[kStages], empty[kStages];
};

constexpr int kSharedBytes = kStages * kStageBytes + static_cast<int>(sizeof(Barriers));

enum Slab { kA, kFirst, kSecond };

// A thread's place among the stages. Producers and consumers go through the stages in the same
// order, across all tiles.
class Ring {
 public:
  __device__ int stage() const { return index_ % kStages; }
  // The parity of the phase in which the stage is filled, or emptied, in this round.
  __device__ uint32_t parity() const { return index_ / kStages % 2; }
  __device__ void advance() { ++index_; }

 private:
  uint32_t index_ = 0;
};

// The compiler knows these addresses, so that they take no registers.
__device__ inline ptx::SharedAddress slab_of(int stage, Slab slab) {
  return ptx::shared_address(ptx::shared_memory()) + stage * kStageBytes + slab * kSlabBytes;
}
__device__ inline Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(ptx::shared_memory() + kStages * kStageBytes);
}

// The descriptor of a matrix in shared memory for wgmma: where the matrix begins, the bytes between
// its parts in both directions, and the swizzle. Addresses and distances are in units of 16 bytes.
// The names are those of the PTX ISA ("matrix descriptor format"):
//   stride:   from 8 lines to the next 8 lines;
//   leading:  from 64 columns to the next 64 columns of a row-major b. Otherwise it is unused, and
//             16 by convention.
__device__ inline uint64_t describe(ptx::SharedAddress start, int leading_bytes) {
  constexpr uint64_t kSwizzle128Bytes = 1;
  return uint64_t{(start & 0x3ffff) >> 4} | uint64_t(leading_bytes >> 4) << 16 |
         uint64_t{kAtomBytes >> 4} << 32 | kSwizzle128Bytes << 62;
}

}  // namespace moe_parallel::fused::hopper
