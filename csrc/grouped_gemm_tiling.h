// Which tiles of CUTLASS's kernels for Hopper compute grouped products. The rules are in
// cuda/cutlass/tiles.h. Torch-free.
#pragma once

namespace moe_parallel {

// kWhereFaster follows the rules that measurements gave. The others prefer one tile wherever a
// product is large or small enough for it, in order to measure it.
enum class Tiling { kWhereFaster, kSquare, kWide, kNarrow };

Tiling tiling();

// Sets it for the process and returns the previous one.
Tiling set_tiling(Tiling wanted);

}  // namespace moe_parallel
