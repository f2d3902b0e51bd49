// The kernels for every processor: 16-byte vectors are SSE2 on x86-64 and NEON on aarch64.
#define MOE_PARALLEL_CAPABILITY portable
#define MOE_PARALLEL_VECTOR_BYTES 16

#include "kernels/table.h"
