// Causal attention on the CPU.
#include "attention.h"

#include <ATen/ops/empty.h>

#include <tuple>

#include "block_product.h"
#include "cpu/processor.h"
#include "launch.h"
#include "onednn_product.h"

namespace moe_parallel {
namespace {

constexpr int64_t kWidest = 256;  // heads, as in flash kernels: blocks of them fit in a cache

void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  check_dim("q", q, 4);
  check_dim("k", k, 4);
  check_together(q, {k, v});
  check_same_type("k", k, "q", q);
  check_same_type("v", v, "q", q);
  check_sizes("k", k, {q.size(0), q.size(1), k.size(2), q.size(3)});
  check_sizes("v", v, k.sizes());
  TORCH_CHECK_VALUE(k.size(2) > 0 && q.size(2) % k.size(2) == 0, "q has ", q.size(2),
                    " heads, which must be a multiple of the ", k.size(2), " of k");
  TORCH_CHECK_VALUE(q.size(3) > 0 && q.size(3) % 2 == 0 && q.size(3) <= kWidest,
                    "a head must be an even number up to ", kWidest, " wide, not ", q.size(3));
  TORCH_CHECK_VALUE(scale > 0, "scale must be positive, not ", scale);
}

AttentionShape shape_of(const at::Tensor& q, const at::Tensor& k, double scale) {
  return {.length = q.size(0),
          .batch = q.size(1),
          .heads = q.size(2),
          .groups = k.size(2),
          .width = q.size(3),
          .scale = scale};
}

// The type in which blocks are multiplied: that of the tensors, or fp32 instead of bf16 and fp16
// where this processor has no products for them.
at::ScalarType type_of_products(const at::Tensor& q) {
  return has_block_products(scalar_type_of("q", q)) ? q.scalar_type() : at::kFloat;
}

at::Tensor with_dense_heads(const at::Tensor& tensor, at::ScalarType type) {
  const auto converted = tensor.to(type);
  return converted.stride(3) == 1 ? converted : converted.contiguous();
}

HeadRows head_rows(const at::Tensor& tensor) {
  return {.data = const_cast<void*>(tensor.const_data_ptr()),
          .token_stride = tensor.stride(0),
          .batch_stride = tensor.stride(1),
          .head_stride = tensor.stride(2)};
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, double scale) {
  check_inputs(q, k, v, scale);
  const auto type = type_of_products(q);
  const auto q_rows = with_dense_heads(q, type), k_rows = with_dense_heads(k, type),
             v_rows = with_dense_heads(v, type);
  const auto out = at::empty(q.sizes(), q_rows.options());
  const auto logsumexp =
      at::empty({q.size(1), q.size(2), q.size(0)}, q.options().dtype(sum_type_of(q)));
  run_on_cpu(Attention{.type = scalar_type_of("q", q_rows),
                       .shape = shape_of(q, k, scale),
                       .q = head_rows(q_rows),
                       .k = head_rows(k_rows),
                       .v = head_rows(v_rows),
                       .out = head_rows(out),
                       .logsumexp = logsumexp.mutable_data_ptr()});
  return {out.to(q.scalar_type()), logsumexp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& logsumexp, double scale) {
  check_inputs(q, k, v, scale);
  check_together(q, {dout, out, logsumexp});
  for (const auto& [name, tensor] : {std::pair{"dout", dout}, {"out", out}}) {
    check_sizes(name, tensor, q.sizes());
    check_same_type(name, tensor, "q", q);
  }
  check_sizes("logsumexp", logsumexp, {q.size(1), q.size(2), q.size(0)});
  TORCH_CHECK_TYPE(logsumexp.scalar_type() == sum_type_of(q), "logsumexp must be ", sum_type_of(q),
                   " for ", q.scalar_type(), ", not ", logsumexp.scalar_type());
  const auto type = type_of_products(q);
  const auto dout_rows = with_dense_heads(dout, type), q_rows = with_dense_heads(q, type),
             k_rows = with_dense_heads(k, type), v_rows = with_dense_heads(v, type),
             out_rows = with_dense_heads(out, type), sums = logsumexp.contiguous();
  const auto dq = at::empty(q.sizes(), q_rows.options());
  const auto dk = at::empty(k.sizes(), q_rows.options());
  const auto dv = at::empty(v.sizes(), q_rows.options());
  run_on_cpu(AttentionBackward{.type = scalar_type_of("q", q_rows),
                               .shape = shape_of(q, k, scale),
                               .dout = head_rows(dout_rows),
                               .q = head_rows(q_rows),
                               .k = head_rows(k_rows),
                               .v = head_rows(v_rows),
                               .out = head_rows(out_rows),
                               .dq = head_rows(dq),
                               .dk = head_rows(dk),
                               .dv = head_rows(dv),
                               .logsumexp = sums.const_data_ptr()});
  return {dq.to(q.scalar_type()), dk.to(q.scalar_type()), dv.to(q.scalar_type())};
}

}  // namespace

bool has_fast_attention(ScalarType type) {
  if (has_avx512()) return multiplies_blocks_by_onednn(type);
  return has_avx2() && is_amd();  // at::mm multiplies its blocks, in fp32
}

}  // namespace moe_parallel

MOE_PARALLEL_CPU_OPERATOR("attention",
                          "(Tensor q, Tensor k, Tensor v, float scale) "
                          "-> (Tensor out, Tensor logsumexp)",
                          moe_parallel::attention)
MOE_PARALLEL_CPU_OPERATOR(
    "attention_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "float scale) -> (Tensor dq, Tensor dk, Tensor dv)",
    moe_parallel::attention_backward)
