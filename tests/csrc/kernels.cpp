// Compares the CPU kernels with plain loops. It uses neither torch nor Python, so that it also runs
// under an emulator (tools/check_aarch64.sh). Every number is a small multiple of 1/4, so that sums
// and products are exact in all types. Results with a root or an exponential are compared with a
// tolerance.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../../csrc/cpu/capability.h"

namespace {

using namespace moe_parallel;

constexpr int64_t kTokens = 5, kChoices = 3, kRows = kTokens * kChoices, kWidth = 531;
constexpr int64_t kWholeLines = 544;  // numbers of any type that fill cache lines
int failures = 0;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A matrix of any type, read and written as doubles. Its fp16 numbers must be normal or 0.
struct Matrix {
  ScalarType type;
  int64_t width;
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines;

  Matrix(ScalarType type, int64_t rows, int64_t width)
      : type(type), width(width), lines(rows * width * size() / 64 + 1) {}

  const char* data() const { return lines.data()->bytes; }
  char* data() { return lines.data()->bytes; }

  int64_t size() const {
    return type == ScalarType::kFloat64 ? 8 : type == ScalarType::kFloat32 ? 4 : 2;
  }

  double at(int64_t row, int64_t column) const {
    const char* p = data() + (row * width + column) * size();
    if (type == ScalarType::kFloat64) return *reinterpret_cast<const double*>(p);
    if (type == ScalarType::kFloat32) return *reinterpret_cast<const float*>(p);
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(p);
    if (type == ScalarType::kBFloat16) return float_of(bits << 16);
    return (bits & 0x7fff) == 0
               ? 0
               : float_of((bits & 0x8000) << 16 | ((bits & 0x7fff) + 0x1c000) << 13);
  }

  void set(int64_t row, int64_t column, double value) {
    char* p = data() + (row * width + column) * size();
    const uint32_t bits = bits_of(static_cast<float>(value));
    if (type == ScalarType::kFloat64) {
      *reinterpret_cast<double*>(p) = value;
    } else if (type == ScalarType::kFloat32) {
      *reinterpret_cast<float*>(p) = static_cast<float>(value);
    } else if (type == ScalarType::kBFloat16) {
      *reinterpret_cast<uint16_t*>(p) = bits >> 16;
    } else {
      *reinterpret_cast<uint16_t*>(p) =
          value == 0 ? 0 : (bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - 0x38000000) >> 13;
    }
  }
};

Matrix quarters(ScalarType type, int64_t rows, int64_t width, int seed) {
  Matrix matrix(type, rows, width);
  for (int64_t i = 0; i < rows * width; ++i) {
    matrix.set(i / width, i % width, ((i * 37 + seed * 11) % 9 - 4) / 4.0);
  }
  return matrix;
}

void expect(const char* what, ScalarType type, double actual, double expected,
            double distance = 0) {
  if (std::abs(actual - expected) <= distance * std::abs(expected)) return;
  if (++failures <= 20) {
    std::printf("%s of type %d: %.9g instead of %.9g\n", what, static_cast<int>(type), actual,
                expected);
  }
}

ScalarType sums_of(ScalarType type) {
  return type == ScalarType::kFloat64 ? type : ScalarType::kFloat32;
}

double rounding_of(ScalarType type) {
  if (type == ScalarType::kFloat64) return 1e-14;
  return type == ScalarType::kFloat32 ? 1e-6 : type == ScalarType::kFloat16 ? 1e-3 : 1e-2;
}

// Row n has choice 7 n modulo the number of choices. The last row is padding.
std::vector<int64_t> slots() {
  std::vector<int64_t> slots(kRows + 1, -1);
  for (int64_t n = 0; n < kRows; ++n) slots[n] = n * 7 % kRows;
  return slots;
}
std::vector<int64_t> rows_of_slots() {
  std::vector<int64_t> rows(kRows, -1);
  for (int64_t n = 0; n < kRows; ++n) rows[n * 7 % kRows] = n;
  return rows;
}

// Columns after those of a row, which a kernel must neither use nor write. Stores past the caches
// have none, because their rows are whole cache lines.
int64_t gap(bool past_caches) { return past_caches ? 0 : 5; }

void expect_gaps(const char* what, const Matrix& matrix, int64_t rows, int64_t width) {
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t i = width; i < matrix.width; ++i) expect(what, matrix.type, matrix.at(n, i), 0);
  }
}

void check_permute(ScalarType type, int64_t width, bool past_caches) {
  const auto map = slots(), rows = rows_of_slots();
  const Matrix x = quarters(type, kTokens, width + 2 * gap(past_caches), 0);
  Matrix y(type, kRows, width + gap(past_caches));
  kernels().permute({.x = x.data(),
                     .slots = map.data(),
                     .y = y.data(),
                     .tokens = kTokens,
                     .choices = kChoices,
                     .rows = kRows,
                     .row_bytes = width * x.size(),
                     .x_stride = x.width * x.size(),
                     .y_stride = y.width * y.size(),
                     .past_caches = past_caches},
                    rows.data(), 0, kTokens);
  for (int64_t n = 0; n < kRows; ++n) {
    for (int64_t i = 0; i < width; ++i) {
      expect("permute", type, y.at(n, i), x.at(map[n] / kChoices, i));
    }
  }
  expect_gaps("gap of permute", y, kRows, width);
}

void check_unpermute(ScalarType type, int64_t width, bool past_caches) {
  const auto map = slots(), rows = rows_of_slots();
  const Matrix y = quarters(type, kRows, width, 1), dout = quarters(type, kTokens, width, 2);
  const Matrix probs = quarters(sums_of(type), kTokens, kChoices, 3);
  Matrix out(type, kTokens, width + gap(past_caches)), dy(type, kRows, width), dprobs(probs);
  Matrix apart(type, kRows, width + 2 * gap(past_caches));
  for (int64_t n = 0; n < kRows; ++n) {
    for (int64_t i = 0; i < width; ++i) apart.set(n, i, y.at(n, i));
  }
  kernels().unpermute({.type = type,
                       .y = apart.data(),
                       .rows = rows.data(),
                       .probs = probs.data(),
                       .out = out.data(),
                       .tokens = kTokens,
                       .choices = kChoices,
                       .num_rows = kRows,
                       .width = width,
                       .y_stride = apart.width,
                       .out_stride = out.width,
                       .past_caches = past_caches},
                      0, kTokens);
  kernels().unpermute_backward({.type = type,
                                .dout = dout.data(),
                                .y = y.data(),
                                .slots = map.data(),
                                .rows = rows.data(),
                                .probs = probs.data(),
                                .dy = dy.data(),
                                .dprobs = dprobs.data(),
                                .tokens = kTokens,
                                .choices = kChoices,
                                .num_rows = kRows,
                                .width = width,
                                .past_caches = past_caches},
                               0, kTokens);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t i = 0; i < width; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < kChoices; ++k) {
        const int64_t row = rows[t * kChoices + k];
        sum += probs.at(t, k) * y.at(row, i);
        expect("dy", type, dy.at(row, i), probs.at(t, k) * dout.at(t, i));
      }
      expect("unpermute", type, out.at(t, i), sum);
    }
    for (int64_t k = 0; k < kChoices; ++k) {
      double product = 0;
      for (int64_t i = 0; i < width; ++i) {
        product += dout.at(t, i) * y.at(rows[t * kChoices + k], i);
      }
      expect("dprobs", type, dprobs.at(t, k), product);
    }
  }
  expect_gaps("gap of unpermute", out, kTokens, width);
}

void check_swiglu(ScalarType type) {
  const Matrix gate = quarters(type, 1, kWidth, 4), up = quarters(type, 1, kWidth, 5);
  const Matrix dh = quarters(type, 1, kWidth, 6), p = quarters(sums_of(type), 1, 1, 2);
  Matrix h(gate), again(gate), dgate(gate), dup(gate), dp(p);
  kernels().swiglu({.type = type,
                    .gate = gate.data(),
                    .up = up.data(),
                    .probs = p.data(),
                    .h = h.data(),
                    .rows = 1,
                    .width = kWidth,
                    .gate_stride = kWidth,
                    .up_stride = kWidth},
                   0, 1);
  kernels().swiglu_backward({.type = type,
                             .dh = dh.data(),
                             .gate = gate.data(),
                             .up = up.data(),
                             .probs = p.data(),
                             .dgate = dgate.data(),
                             .dup = dup.data(),
                             .dprobs = dp.data(),
                             .h = again.data(),
                             .rows = 1,
                             .width = kWidth,
                             .gate_stride = kWidth,
                             .up_stride = kWidth,
                             .dgate_stride = kWidth,
                             .dup_stride = kWidth},
                            0, 1);
  double sum = 0, size = 0;
  for (int64_t i = 0; i < kWidth; ++i) {
    const double g = gate.at(0, i), u = up.at(0, i), d = dh.at(0, i), scale = p.at(0, 0);
    const double sigmoid = 1 / (1 + std::exp(-g)), rounding = rounding_of(type);
    expect("swiglu", type, h.at(0, i), scale * g * sigmoid * u, rounding);
    expect("h of backward", type, again.at(0, i), scale * g * sigmoid * u, rounding);
    expect("dup", type, dup.at(0, i), scale * d * g * sigmoid, rounding);
    expect("dgate", type, dgate.at(0, i), scale * d * u * sigmoid * (1 + g * (1 - sigmoid)),
           rounding);
    sum += d * g * sigmoid * u;
    size += std::abs(d * g * sigmoid * u);
  }
  expect("dprobs", type, dp.at(0, 0) + size, sum + size, rounding_of(sums_of(type)));
}

void check_merge(ScalarType type) {
  constexpr int64_t kMerges = 5, kExperts = 3;
  const Matrix w = quarters(type, kExperts, kWidth, 7),
               dmerged = quarters(type, kMerges, kWidth, 8);
  const Matrix weights = quarters(sums_of(type), kMerges, kExperts, 0);
  Matrix merged(dmerged), dw(w), dweights(weights);
  alignas(
      64) static char scratch[(kMerges + kExperts) * kMergeStride * 8 + kMerges * kExperts * 64];
  kernels().expert_merge({.type = type,
                          .weights = weights.data(),
                          .w = w.data(),
                          .merged = merged.data(),
                          .merges = kMerges,
                          .num_experts = kExperts,
                          .size = kWidth},
                         0, kWidth, scratch);
  kernels().expert_merge_backward({.type = type,
                                   .dmerged = dmerged.data(),
                                   .weights = weights.data(),
                                   .w = w.data(),
                                   .dweights = dweights.data(),
                                   .dw = dw.data(),
                                   .merges = kMerges,
                                   .num_experts = kExperts,
                                   .size = kWidth},
                                  0, kWidth, scratch, dweights.data());
  for (int64_t i = 0; i < kWidth; ++i) {
    for (int64_t m = 0; m < kMerges; ++m) {
      double sum = 0;
      for (int64_t e = 0; e < kExperts; ++e) sum += weights.at(m, e) * w.at(e, i);
      expect("merged", type, merged.at(m, i), sum);
    }
    for (int64_t e = 0; e < kExperts; ++e) {
      double sum = 0;
      for (int64_t m = 0; m < kMerges; ++m) sum += weights.at(m, e) * dmerged.at(m, i);
      expect("dw", type, dw.at(e, i), sum);
    }
  }
  for (int64_t m = 0; m < kMerges; ++m) {
    for (int64_t e = 0; e < kExperts; ++e) {
      double sum = 0;
      for (int64_t i = 0; i < kWidth; ++i) sum += dmerged.at(m, i) * w.at(e, i);
      expect("dweights", type, dweights.at(m, e), sum);
    }
  }
}

void check_rms_norm(ScalarType type) {
  constexpr double kEps = 0.25;
  const Matrix x = quarters(type, kTokens, kWidth, 2), dy = quarters(type, kTokens, kWidth, 3);
  const Matrix weight = quarters(sums_of(type), 1, kWidth, 4);
  Matrix y(x), dx(x), dweight(weight), r(sums_of(type), kTokens, 1);
  kernels().rms_norm({.type = type,
                      .x = x.data(),
                      .weight = weight.data(),
                      .y = y.data(),
                      .r = r.data(),
                      .rows = kTokens,
                      .width = kWidth,
                      .eps = kEps},
                     0, kTokens);
  kernels().rms_norm_backward({.type = type,
                               .dy = dy.data(),
                               .x = x.data(),
                               .weight = weight.data(),
                               .r = r.data(),
                               .dx = dx.data(),
                               .dweights = dweight.data(),
                               .rows = kTokens,
                               .width = kWidth},
                              0, 1);
  const double rounding = rounding_of(type), of_sums = rounding_of(sums_of(type));
  double roots[kTokens];
  for (int64_t t = 0; t < kTokens; ++t) {
    double squares = 0, product = 0;
    for (int64_t i = 0; i < kWidth; ++i) squares += x.at(t, i) * x.at(t, i);
    roots[t] = 1 / std::sqrt(squares / kWidth + kEps);
    expect("r", type, r.at(t, 0), roots[t], of_sums);
    for (int64_t i = 0; i < kWidth; ++i) {
      product += dy.at(t, i) * weight.at(0, i) * x.at(t, i) * roots[t];
    }
    for (int64_t i = 0; i < kWidth; ++i) {
      const double z = x.at(t, i) * roots[t], g = dy.at(t, i) * weight.at(0, i);
      expect("rms_norm", type, y.at(t, i), z * weight.at(0, i), rounding);
      // 8 is larger than all gradients: what cancels is compared with what it came from.
      expect("dx", type, dx.at(t, i) + 8, roots[t] * (g - z * product / kWidth) + 8, rounding);
    }
  }
  for (int64_t i = 0; i < kWidth; ++i) {
    double sum = 0;
    for (int64_t t = 0; t < kTokens; ++t) sum += dy.at(t, i) * x.at(t, i) * roots[t];
    expect("dweight", type, dweight.at(0, i) + 8, sum + 8, of_sums);
  }
}

// The last row has no label among its columns.
void check_softmax(ScalarType type) {
  constexpr int64_t kLabels[kTokens] = {0, 17, kWidth - 1, 256, kWidth};
  const auto of_sums = sums_of(type);
  const Matrix logits = quarters(type, kTokens, kWidth, 5);
  Matrix dlogits(logits), most(of_sums, kTokens, 1), sums(most);
  kernels().softmax_sums({.type = type,
                          .logits = logits.data(),
                          .most = most.data(),
                          .sums = sums.data(),
                          .rows = kTokens,
                          .width = kWidth},
                         0, kTokens);
  kernels().softmax_gradient({.type = type,
                              .logits = dlogits.data(),
                              .labels = kLabels,
                              .most = most.data(),
                              .sums = sums.data(),
                              .rows = kTokens,
                              .width = kWidth},
                             0, kTokens);
  for (int64_t t = 0; t < kTokens; ++t) {
    double largest = -INFINITY, sum = 0;
    for (int64_t i = 0; i < kWidth; ++i) largest = std::max(largest, logits.at(t, i));
    for (int64_t i = 0; i < kWidth; ++i) sum += std::exp(logits.at(t, i) - largest);
    expect("largest logit", type, most.at(t, 0), largest);
    expect("sum of exponentials", type, sums.at(t, 0), sum, rounding_of(of_sums));
    for (int64_t i = 0; i < kWidth; ++i) {
      const double p = std::exp(logits.at(t, i) - largest) / sum;
      expect("dlogits", type, dlogits.at(t, i), p - (i == kLabels[t]), rounding_of(type));
    }
  }
}

// Two groups of two heads to rotate and one to copy, of two sequences, which have the same table.
// Its numbers need not be a cosine and a sine.
void check_rotary(ScalarType type) {
  constexpr int64_t kLength = 2, kBatch = 2, kGroups = 2, kPerGroup = 3, kHalf = 21;
  constexpr int64_t kRow = 2 * kHalf, kHeads = kGroups * kPerGroup;
  constexpr int64_t kAll = kLength * kBatch * kHeads;
  const auto sums = sums_of(type);
  const Matrix x = quarters(type, kAll, kRow, 3);
  const Matrix cos = quarters(sums, kLength, kHalf, 1), sin = quarters(sums, kLength, kHalf, 2);
  Matrix y(type, kAll, kRow), z(type, kAll, kRow);
  const HeadStrides strides{
      .place = kBatch * kHeads * kRow,
      .sequence = kHeads * kRow,
      .group = kPerGroup * kRow,
      .head = kRow,
  };
  const auto turn = [&](Matrix& to, bool inverse) {
    const Heads rotated{x.data(), to.data(), strides, strides, kGroups, kPerGroup - 1, true};
    const int64_t last = (kPerGroup - 1) * kRow * x.size();
    const Heads copied{x.data() + last, to.data() + last, strides, strides, kGroups, 1, false};
    kernels().rotary({.type = type,
                      .heads = {rotated, copied},
                      .kinds = 2,
                      .angles = nullptr,
                      .cos = cos.data(),
                      .sin = sin.data(),
                      .angles_place_stride = kHalf,
                      .angles_sequence_stride = 0,
                      .length = kLength,
                      .batch = kBatch,
                      .half = kHalf,
                      .inverse = inverse},
                     0, kLength * kBatch);
  };
  turn(y, false);
  turn(z, true);
  for (int64_t row = 0; row < kAll; ++row) {
    const int64_t s = row / (kBatch * kHeads);
    const bool is_copied = row % kPerGroup == kPerGroup - 1;
    for (int64_t i = 0; i < kHalf; ++i) {
      const double c = is_copied ? 1 : cos.at(s, i), d = is_copied ? 0 : sin.at(s, i);
      const double first = x.at(row, i), second = x.at(row, kHalf + i);
      expect("first of a pair", type, y.at(row, i), first * c - second * d);
      expect("second of a pair", type, y.at(row, kHalf + i), second * c + first * d);
      expect("first, inverse", type, z.at(row, i), first * c + second * d);
      expect("second, inverse", type, z.at(row, kHalf + i), second * c - first * d);
    }
  }
}

// Three queries that see all of a first block of keys, and of a second one 1, 2 and 3.
void check_attention(ScalarType type) {
  constexpr int64_t kQueries = 3, kKeys = 32, kHead = 5;
  const auto sums = sums_of(type);
  Matrix weights(type, kQueries, kKeys), largest(sums, kQueries, 1), total(largest),
      sum = quarters(sums, kQueries, kHead, 1), logsumexp(largest), out(type, kQueries, kHead);
  const Matrix given(sum),
      blocks[] = {quarters(sums, kQueries, kKeys, 2), quarters(sums, kQueries, kKeys, 4)};
  for (int64_t block = 0; block < 2; ++block) {
    kernels().attention_weights({.type = type,
                                 .scores = blocks[block].data(),
                                 .weights = weights.data(),
                                 .largest = largest.data(),
                                 .total = total.data(),
                                 .out = sum.data(),
                                 .stride = kKeys,
                                 .keys = kKeys,
                                 .width = kHead,
                                 .seen = block == 0 ? kKeys : 1,
                                 .scale = 2,
                                 .is_first = block == 0},
                                0, kQueries);
  }
  kernels().attention_output({.type = type,
                              .largest = largest.data(),
                              .total = total.data(),
                              .sum = sum.data(),
                              .out = out.data(),
                              .logsumexp = logsumexp.data(),
                              .width = kHead,
                              .out_stride = kHead},
                             0, kQueries);
  for (int64_t q = 0; q < kQueries; ++q) {
    double first = -INFINITY, most = -INFINITY, all = 0;
    for (int64_t k = 0; k < kKeys; ++k) first = std::max(first, 2 * blocks[0].at(q, k));
    for (int64_t k = 0; k <= q; ++k) most = std::max(most, 2 * blocks[1].at(q, k));
    most = std::max(first, most);
    for (int64_t k = 0; k < kKeys; ++k) {
      const double weight = k <= q ? std::exp(2 * blocks[1].at(q, k) - most) : 0;
      expect("weight", type, weights.at(q, k), weight, rounding_of(type));
      all += weight + std::exp(2 * blocks[0].at(q, k) - most);
    }
    expect("logsumexp", type, logsumexp.at(q, 0), most + std::log(all), rounding_of(sums));
    for (int64_t i = 0; i < kHead; ++i) {
      expect("out", type, out.at(q, i), given.at(q, i) * std::exp(first - most) / all,
             rounding_of(type));
    }
  }
}

// Two keys, of which the first 3 and 4 queries see nothing.
void check_attention_gradient(ScalarType type) {
  constexpr int64_t kQueries = 32;
  const auto sums = sums_of(type);
  const Matrix scores = quarters(sums, 2, kQueries, 1), dweights = quarters(sums, 2, kQueries, 2),
               logsumexp = quarters(sums, 1, kQueries, 3), dots = quarters(sums, 1, kQueries, 4);
  Matrix weights(type, 2, kQueries), dscores(weights), pairs(type, 1, 2 * kQueries);
  kernels().attention_score_gradient({.type = type,
                                      .scores = scores.data(),
                                      .dweights = dweights.data(),
                                      .logsumexp = logsumexp.data(),
                                      .dots = dots.data(),
                                      .weights = weights.data(),
                                      .dscores = dscores.data(),
                                      .dscore_pairs = pairs.data(),
                                      .stride = kQueries,
                                      .queries = kQueries,
                                      .unseeing = 3,
                                      .scale = 2},
                                     0, 1);
  for (int64_t k = 0; k < 2; ++k) {
    for (int64_t q = 0; q < kQueries; ++q) {
      const double weight = q < 3 + k ? 0 : std::exp(2 * scores.at(k, q) - logsumexp.at(0, q));
      const double dscore = weight * (dweights.at(k, q) - dots.at(0, q));
      expect("weight of backward", type, weights.at(k, q), weight, rounding_of(type));
      expect("dscore", type, dscores.at(k, q), dscore, rounding_of(type));
      if (pairs.size() == 2) expect("pair", type, pairs.at(0, 2 * q + k), dscores.at(k, q));
    }
  }
}

void check_norms(ScalarType type) {
  const Matrix c = quarters(type, kTokens, kWidth, 1);
  Matrix norms(sums_of(type), kTokens, 1), dc(c);
  kernels().group_norms({.type = type,
                         .c_TER = c.data(),
                         .norms = norms.data(),
                         .tokens = kTokens,
                         .num_experts = 1,
                         .rank = kWidth},
                        0, kTokens);
  const Matrix factors = quarters(sums_of(type), kTokens, 1, 5);
  kernels().norm_gradient({.type = type,
                           .c_TER = c.data(),
                           .factors = factors.data(),
                           .experts = nullptr,
                           .dc_TKR = nullptr,
                           .dc_TER = dc.data(),
                           .tokens = kTokens,
                           .num_experts = 1,
                           .rank = kWidth,
                           .k = 0},
                          0, kTokens);
  for (int64_t t = 0; t < kTokens; ++t) {
    double sum = 0;
    for (int64_t i = 0; i < kWidth; ++i) {
      sum += c.at(t, i) * c.at(t, i);
      expect("dc", type, dc.at(t, i), factors.at(t, 0) * c.at(t, i));
    }
    expect("norms", type, norms.at(t, 0), std::sqrt(sum), rounding_of(sums_of(type)));
  }
}

void check_transpose() {
  const int64_t rows = 37, padded = 40, columns = 21, apart = 45;
  std::vector<uint32_t> from(rows * columns), to(columns * apart, 7);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint32_t>(i + 100000);
  kernels().transpose_words({.from = from.data(),
                             .stride = columns * 4,
                             .rows = rows,
                             .padded = padded,
                             .columns = columns,
                             .to = to.data(),
                             .to_stride = apart * 4});
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < apart; ++r) {
      const uint32_t expected = r < rows ? from[r * columns + c] : r < padded ? 0 : 7;
      expect("transpose", ScalarType::kFloat32, to[c * apart + r], expected);
    }
  }
}

void check_pairs() {
  const int64_t count = 5, padded = 8, width = 37;
  std::vector<uint16_t> rows(padded * width, 0);
  for (int64_t i = 0; i < count * width; ++i) rows[i] = static_cast<uint16_t>(i + 60000);
  std::vector<uint32_t> pairs(padded / 2 * width, 7);
  kernels().pair_rows({.rows = rows.data(),
                       .stride = width,
                       .count = count,
                       .padded = padded,
                       .width = width,
                       .to = pairs.data()});
  for (int64_t row = 0; row < padded; ++row) {
    for (int64_t n = 0; n < width; ++n) {
      const uint32_t half = pairs[row / 2 * width + n] >> (row % 2 * 16) & 0xffff;
      expect("pairs", ScalarType::kBFloat16, half, rows[row * width + n]);
    }
  }
}

void check_topk() {
  const float norms[] = {1, 3, NAN, 3, -2, 3, -INFINITY, 0};
  int64_t experts[8];
  kernels().select_topk({.type = ScalarType::kFloat32,
                         .norms = norms,
                         .bias = nullptr,
                         .experts = experts,
                         .tokens = 1,
                         .num_experts = 8,
                         .k = 8},
                        0, 1);
  const int64_t expected[] = {2, 1, 3, 5, 0, 7, 4, 6};
  for (int i = 0; i < 8; ++i) expect("topk", ScalarType::kFloat32, experts[i], expected[i]);
}

}  // namespace

int main() {
  for (const auto type :
       {ScalarType::kFloat32, ScalarType::kFloat64, ScalarType::kBFloat16, ScalarType::kFloat16}) {
    check_permute(type, kWidth, false);
    check_permute(type, kWholeLines, true);
    check_unpermute(type, kWidth, false);
    check_unpermute(type, kWholeLines, true);
    check_swiglu(type);
    check_merge(type);
    check_rms_norm(type);
    check_softmax(type);
    check_rotary(type);
    check_attention(type);
    check_attention_gradient(type);
    check_norms(type);
  }
  check_topk();
  check_transpose();
  check_pairs();
  std::printf("%s kernels: %d failures\n", cpu_capability().name, failures);
  return failures > 0;
}
