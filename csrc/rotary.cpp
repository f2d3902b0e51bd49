// Rotary position embeddings of queries and keys.
#include "rotary.h"

#include <ATen/ops/cos.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sin.h>

#include <tuple>

#include "launch.h"

namespace moe_parallel {
namespace {

// The stride of a dimension; 0 if one entry serves all.
int64_t stride_of(const at::Tensor& t, int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); }

// The angles of half a head, of which the other half is a copy: [length, batch or 1, half].
at::Tensor half_of(const at::Tensor& angles, const at::Tensor& x) {
  check_dim("angles", angles, 4);
  const int64_t length = x.size(0), batch = x.size(1), width = x.size(3);
  const int64_t sequences = angles.size(1) == 1 ? 1 : batch;
  check_sizes("angles", angles, {length, sequences, 1, width});
  TORCH_CHECK_VALUE(width % 2 == 0, "heads must have an even width, not ", width);
  check_together(x, {angles});
  const auto half = angles.select(2, 0).narrow(2, 0, width / 2).to(sum_type_of(x));
  // On the CPU dense, so that their cosines and sines have the same strides.
  return half.stride(2) == 1 && !x.is_cpu() ? half : half.contiguous();
}

struct Angles {
  at::Tensor angles, cos, sin;

  Angles(const at::Tensor& given, const at::Tensor& x) : angles(half_of(given, x)) {
    if (!x.is_cpu()) return;
    cos = angles.cos();
    sin = angles.sin();
  }
};

at::Tensor rotate(const char* name, const at::Tensor& x, const Angles& angles, bool inverse) {
  const auto with_dense_heads = x.stride(3) == 1 ? x : x.contiguous();
  auto y = at::empty(x.sizes(), x.options());
  const auto data_of = [](const at::Tensor& t) {
    return t.defined() ? t.const_data_ptr() : nullptr;
  };
  launch(x, Rotary{.type = scalar_type_of(name, x),
                   .x = with_dense_heads.const_data_ptr(),
                   .angles = angles.angles.const_data_ptr(),
                   .cos = data_of(angles.cos),
                   .sin = data_of(angles.sin),
                   .y = y.mutable_data_ptr(),
                   .length = x.size(0),
                   .batch = x.size(1),
                   .heads = x.size(2),
                   .half = x.size(3) / 2,
                   .place_stride = with_dense_heads.stride(0),
                   .sequence_stride = with_dense_heads.stride(1),
                   .head_stride = with_dense_heads.stride(2),
                   .angles_place_stride = stride_of(angles.angles, 0),
                   .angles_sequence_stride = stride_of(angles.angles, 1),
                   .inverse = inverse});
  return y;
}

std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& angles, bool inverse) {
  check_dim("q", q, 4);
  check_sizes("k", k, {q.size(0), q.size(1), k.dim() == 4 ? k.size(2) : 1, q.size(3)});
  check_same_type("k", k, "q", q);
  check_together(q, {k});
  const Angles of_tokens(angles, q);
  return {rotate("q", q, of_tokens, inverse), rotate("k", k, of_tokens, inverse)};
}

}  // namespace
}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("rotary",
                      "(Tensor q, Tensor k, Tensor angles, bool inverse) -> (Tensor, Tensor)",
                      moe_parallel::rotary)
