#pragma once

struct __half {
  _Float16 x;
};

inline float __half2float(__half x) { return x.x; }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
