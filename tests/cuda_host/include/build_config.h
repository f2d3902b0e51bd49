#pragma once
#define MOE_PARALLEL_BUILT_FOR_HOPPER true
