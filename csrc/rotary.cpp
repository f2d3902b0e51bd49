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
at::Tensor half_of(const at::Tensor& angles, const at::Tensor& x, int64_t width) {
  check_dim("angles", angles, 4);
  const int64_t length = x.size(0), batch = x.size(1);
  const int64_t sequences = angles.size(1) == 1 ? 1 : batch;
  check_sizes("angles", angles, {length, sequences, 1, width});
  TORCH_CHECK_VALUE(width % 2 == 0, "heads must have an even width, not ", width);
  check_together(x, {angles});
  const auto half = angles.select(2, 0).narrow(2, 0, width / 2).to(sum_type_of(x));
  // On the CPU dense, so that their cosines and sines have the same strides.
  return half.stride(2) == 1 && !x.is_cpu() ? half : half.contiguous();
}

at::Tensor with_dense_heads(const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

// The heads of a tensor [length, batch, heads, width].
HeadStrides strides_of(const at::Tensor& x) {
  return {.place = x.stride(0), .sequence = x.stride(1), .group = 0, .head = x.stride(2)};
}

// The same heads in groups, as a tensor of groups of heads [length, batch, groups, heads * width]
// is divided.
HeadStrides strides_of(const at::Tensor& x, int64_t per_group) {
  return {.place = x.stride(0),
          .sequence = x.stride(1),
          .group = per_group * x.stride(2),
          .head = x.stride(2)};
}

// Queries, keys and values in the output of one linear layer, [length, batch, groups, (r + 2) *
// width]: in each group r heads of queries, one of keys and one of values.
class MixedHeads {
 public:
  MixedHeads(const at::Tensor& mixed, int64_t width)
      : mixed_(mixed), width_(width), per_group_(mixed.size(3) / width - 2) {}

  int64_t heads(int kind) const { return mixed_.size(2) * (kind == 0 ? per_group_ : 1); }

  // The heads of a kind (queries, keys, values) here, and in a tensor of their own.
  Heads from(int kind, const at::Tensor& y) const {
    return {.x = static_cast<const char*>(mixed_.const_data_ptr()) + offset(kind),
            .y = y.mutable_data_ptr(),
            .of_x = strides(),
            .of_y = strides_of(y, per_group(kind)),
            .groups = mixed_.size(2),
            .per_group = per_group(kind),
            .are_rotated = kind < 2};
  }
  Heads to(int kind, const at::Tensor& x) const {
    return {.x = x.const_data_ptr(),
            .y = static_cast<char*>(mixed_.mutable_data_ptr()) + offset(kind),
            .of_x = strides_of(x, per_group(kind)),
            .of_y = strides(),
            .groups = mixed_.size(2),
            .per_group = per_group(kind),
            .are_rotated = kind < 2};
  }

 private:
  int64_t per_group(int kind) const { return kind == 0 ? per_group_ : 1; }
  int64_t offset(int kind) const {
    const int64_t heads_before = kind == 0 ? 0 : per_group_ + kind - 1;
    return heads_before * width_ * mixed_.element_size();
  }
  HeadStrides strides() const {
    return {.place = mixed_.stride(0),
            .sequence = mixed_.stride(1),
            .group = mixed_.stride(2),
            .head = width_};
  }

  const at::Tensor& mixed_;
  int64_t width_;
  int64_t per_group_;
};

// The kernel's task without its heads. It holds the tensors of the angles.
struct Rotation {
  at::Tensor angles, cos, sin;
  Rotary task;

  Rotation(const char* name, const at::Tensor& x, int64_t width, const at::Tensor& given,
           bool inverse)
      : angles(half_of(given, x, width)) {
    if (x.is_cpu()) {
      cos = angles.cos();
      sin = angles.sin();
    }
    const auto data_of = [](const at::Tensor& t) {
      return t.defined() ? t.const_data_ptr() : nullptr;
    };
    task = {.type = scalar_type_of(name, x),
            .heads = {},
            .kinds = 0,
            .angles = angles.const_data_ptr(),
            .cos = data_of(cos),
            .sin = data_of(sin),
            .angles_place_stride = stride_of(angles, 0),
            .angles_sequence_stride = stride_of(angles, 1),
            .length = x.size(0),
            .batch = x.size(1),
            .half = width / 2,
            .inverse = inverse};
  }

  void add(const Heads& heads) { task.heads[task.kinds++] = heads; }
};

std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& angles, bool inverse) {
  check_dim("q", q, 4);
  check_sizes("k", k, {q.size(0), q.size(1), k.dim() == 4 ? k.size(2) : 1, q.size(3)});
  check_same_type("k", k, "q", q);
  check_together(q, {k});
  Rotation rotation("q", q, q.size(3), angles, inverse);
  const auto rotate = [&](const at::Tensor& x) {
    auto y = at::empty(x.sizes(), x.options());
    rotation.add({.x = x.const_data_ptr(),
                  .y = y.mutable_data_ptr(),
                  .of_x = strides_of(x),
                  .of_y = strides_of(y),
                  .groups = 1,
                  .per_group = x.size(2),
                  .are_rotated = true});
    return y;
  };
  const auto dense_q = with_dense_heads(q), dense_k = with_dense_heads(k);
  const auto rotated_q = rotate(dense_q), rotated_k = rotate(dense_k);
  launch(q, rotation.task);
  return {rotated_q, rotated_k};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> split_and_rotate(const at::Tensor& qkv,
                                                                const at::Tensor& angles) {
  check_dim("qkv", qkv, 4);
  check_dim("angles", angles, 4);
  const int64_t width = angles.size(3);
  TORCH_CHECK_VALUE(width > 0 && qkv.size(3) % width == 0 && qkv.size(3) / width > 2,
                    "the last dimension of qkv must be r + 2 heads of ", width, ", not ",
                    qkv.size(3));
  const auto mixed = with_dense_heads(qkv);
  const MixedHeads heads(mixed, width);
  Rotation rotation("qkv", qkv, width, angles, /*inverse=*/false);
  const auto take = [&](int kind) {
    auto y = at::empty({qkv.size(0), qkv.size(1), heads.heads(kind), width}, qkv.options());
    rotation.add(heads.from(kind, y));
    return y;
  };
  const auto q = take(0), k = take(1), v = take(2);
  launch(qkv, rotation.task);
  return {q, k, v};
}

at::Tensor split_and_rotate_backward(const at::Tensor& dq, const at::Tensor& dk,
                                     const at::Tensor& dv, const at::Tensor& angles) {
  check_dim("dq", dq, 4);
  const int64_t length = dq.size(0), batch = dq.size(1), width = dq.size(3);
  check_dim("dk", dk, 4);
  const int64_t groups = dk.size(2);
  check_sizes("dk", dk, {length, batch, groups, width});
  check_sizes("dv", dv, dk.sizes());
  check_same_type("dk", dk, "dq", dq);
  check_same_type("dv", dv, "dq", dq);
  check_together(dq, {dk, dv});
  TORCH_CHECK_VALUE(groups > 0 && dq.size(2) > 0 && dq.size(2) % groups == 0, dq.size(2),
                    " heads of queries cannot be divided among ", groups, " of keys");
  const int64_t per_group = dq.size(2) / groups;
  auto dqkv = at::empty({length, batch, groups, (per_group + 2) * width}, dq.options());
  const MixedHeads heads(dqkv, width);
  Rotation rotation("dq", dq, width, angles, /*inverse=*/true);
  const at::Tensor from[] = {with_dense_heads(dq), with_dense_heads(dk), with_dense_heads(dv)};
  for (int kind = 0; kind < Rotary::kMost; ++kind) rotation.add(heads.to(kind, from[kind]));
  launch(dq, rotation.task);
  return dqkv;
}

}  // namespace
}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("rotary",
                      "(Tensor q, Tensor k, Tensor angles, bool inverse) -> (Tensor, Tensor)",
                      moe_parallel::rotary)
MOE_PARALLEL_OPERATOR("split_and_rotate",
                      "(Tensor qkv, Tensor angles) -> (Tensor q, Tensor k, Tensor v)",
                      moe_parallel::split_and_rotate)
MOE_PARALLEL_OPERATOR("split_and_rotate_backward",
                      "(Tensor dq, Tensor dk, Tensor dv, Tensor angles) -> Tensor dqkv",
                      moe_parallel::split_and_rotate_backward)
