// How `fa_int8` quantizes q and k before it attends: the form of each, and its place in the workspace.
#pragma once

#include "kernels/attention/fa_int8/config.h"
#include "kernels/quantize/quantize/passes.cuh"

namespace qf {
namespace fa_int8 {

// A token's threads are a power of two, hence the 2.
static_assert(2 * kHeadDim * kKeyGroup <= 8 * kQuantizeThreads * kLeastPlaces, "keys are quantized in one pass");

// Rows of int8 are padded to whole 16-byte chunks, which must hold zeros past head_dim.
inline int64_t padded(int head_dim) { return (head_dim + 15) / 16 * 16; }

struct Workspace {
  QfQuantizeParams q, k;
  int64_t q_values, k_values, q_scales, k_scales, means, q_dot_mean, nonfinite, scratch;  // byte offsets
  int64_t scratch_bytes, bytes;

  explicit Workspace(const QfAttnParams& p) {
    const int64_t rows_q = p.cu_seqlens_q ? p.total_q : int64_t(p.batch) * p.q_len;
    const int64_t rows_k = p.cu_seqlens_q ? p.total_k : int64_t(p.batch) * p.k_len;
    const int64_t groups = ceil_of(p.k_len, kKeyGroup);
    bytes = 0;
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += (size + 255) / 256 * 256;
      return at;
    };
    q_values = take(rows_q * p.q_heads * padded(p.head_dim));
    k_values = take(rows_k * p.kv_heads * padded(p.head_dim));
    q_scales = take(int64_t(p.batch) * p.q_heads * p.q_len * 4);
    k_scales = take(int64_t(p.batch) * p.kv_heads * groups * 4);
    means = take(int64_t(p.batch) * p.kv_heads * p.head_dim * 4);
    q_dot_mean = take(int64_t(p.batch) * p.q_heads * p.q_len * 4);
    nonfinite = take(int64_t(p.batch) * p.kv_heads * 4);

    // Q: one scale per token. K: less its mean, one scale per kKeyGroup tokens. Both are rotated first.
    q = quantization(p, p.q, p.q_heads, p.q_len, 1);
    q.queries = 1;
    q.cu_seqlens = p.cu_seqlens_q, q.total = p.total_q;
    q.key_lens = p.kv_lens, q.cu_seqlens_k = p.cu_seqlens_k, q.key_length = p.k_len;
    q.kv_heads = p.kv_heads;
    k = quantization(p, p.kv.k, p.kv_heads, p.k_len, kKeyGroup);
    k.smooth = 1;
    k.lens = p.kv_lens, k.cu_seqlens = p.cu_seqlens_k, k.total = p.total_k;
    const int64_t needs_q = passes_of(q).workspace_bytes(), needs_k = passes_of(k).workspace_bytes();
    scratch_bytes = needs_q > needs_k ? needs_q : needs_k;
    scratch = take(scratch_bytes);
  }

  // Fills in the pointers, and the attention that follows.
  QfAttnParams place(const QfAttnParams& p) {
    char* const base = static_cast<char*>(p.workspace);
    const auto floats = [&](int64_t at) { return reinterpret_cast<float*>(base + at); };
    q.values.data = base + q_values, k.values.data = base + k_values;
    q.scale = floats(q_scales), k.scale = floats(k_scales);
    k.mean = floats(means), q.k_mean = k.mean, q.q_dot_mean = floats(q_dot_mean);
    k.nonfinite = reinterpret_cast<int32_t*>(base + nonfinite);
    q.workspace = k.workspace = base + scratch;
    q.workspace_bytes = k.workspace_bytes = scratch_bytes;

    QfAttnParams result = p;
    result.q = q.values, result.kv.k = k.values;
    result.rope = QfRope{};
    result.q_scales = scales(q), result.kv.k_scales = scales(k);
    result.q_dot_mean = q.q_dot_mean;
    result.kv.kind = QF_KV_QUANTIZED;
    result.kv.k_dtype = QF_I8;
    result.kv.k_nonfinite = k.nonfinite;
    return result;
  }

 private:
  static QfQuantizeParams quantization(const QfAttnParams& p, const QfTensor& x, int heads, int length, int group) {
    QfQuantizeParams result{};
    result.struct_bytes = sizeof result;
    result.dtype = p.dtype;
    result.batch = p.batch, result.length = length, result.heads = heads, result.head_dim = p.head_dim;
    result.granularity = QF_PER_GROUP, result.group = group, result.symmetric = 1;
    result.x = x;
    const int64_t width = padded(p.head_dim);
    result.values = {nullptr, p.cu_seqlens_q ? 0 : length * heads * width, heads * width, width};
    result.rope = p.rope;
    return result;
  }
  static QfScales scales(const QfQuantizeParams& x) {
    const int64_t groups = ceil_of(x.length, x.group);
    return {x.scale, nullptr, nullptr, x.heads * groups, groups, x.group, 0};
  }
};

}  // namespace fa_int8
}  // namespace qf
