// Layout of the workspace of `sm90_int8`: what it passes from one launch to the next.
#pragma once

#include "kernels/attention/sm90_int8/config.h"
#include "quant/sm90/params.cuh"

namespace qf {
namespace sm90_int8 {

template <class Config>
struct Workspace {
  static constexpr bool kFp8 = Config::kFp8;
  static constexpr int kExponentKeys = Config::kExponentKeys;

  // Byte offsets. The counter is for work tiles; K and V are here unless they were quantized by an earlier call.
  int64_t counter, q, q_scale, q_dot_mean, k, k_scale, k_mean, k_nonfinite, v, v_scale, v_exponents, v_nonfinite,
      v_mean, copies;
  int64_t bytes = 0;
  int64_t rows_q, rows_k, width, v_columns;  // width: of a row of integers; columns: of a channel of transposed V

  // copy_bytes: for copies of V.
  Workspace(const QfAttnParams& p, int64_t copy_bytes) {
    const bool kv_kept = p.kv.kind == QF_KV_KEPT;
    const bool packed = p.cu_seqlens_q || p.total_q > 0 || p.total_k > 0;
    const int64_t batch = p.batch;
    width = kept_width(p.head_dim);
    rows_q = packed ? p.total_q : batch * p.q_len;
    rows_k = packed ? p.total_k : batch * p.k_len;
    const int64_t tiles = (int64_t(p.k_len) + kExponentKeys - 1) / kExponentKeys;
    v_columns = (packed ? p.total_k / kExponentKeys + batch + 1 : tiles) * kExponentKeys;
    const int64_t kv_heads = kv_kept ? 0 : p.kv_heads, heads = batch * kv_heads, fp8_heads = kFp8 ? heads : 0;
    counter = take(256);
    q = take(rows_q * p.q_heads * width);
    // One tile more than there are rows: reads do not check where a sequence ends.
    q_scale = take((batch * p.q_heads * p.q_len + Config::kBlockM) * 4);
    q_dot_mean = take((batch * p.q_heads * p.q_len + Config::kBlockM) * 4);
    k = take(rows_k * kv_heads * width);
    k_scale = take(heads * ((int64_t(p.k_len) + kKeptKeyGroup - 1) / kKeptKeyGroup) * 4);
    k_mean = take(heads * p.head_dim * 4);
    k_nonfinite = take(heads * 4);
    v = take((packed ? 1 : batch) * (kFp8 ? kv_heads : 0) * p.head_dim * v_columns);
    v_scale = take(fp8_heads * 4);
    v_exponents = take(fp8_heads * tiles * 4);
    v_nonfinite = take(fp8_heads * 4);
    v_mean = take(fp8_heads * p.head_dim * 4);
    copies = take(copy_bytes);
  }
  KeptKv kv(char* base) const {
    const auto floats = [&](int64_t at) { return reinterpret_cast<float*>(base + at); };
    const auto counts = [&](int64_t at) { return reinterpret_cast<int32_t*>(base + at); };
    KeptKv result{};
    result.k = reinterpret_cast<int8_t*>(base + k);
    result.k_scale = floats(k_scale), result.k_mean = floats(k_mean), result.k_nonfinite = counts(k_nonfinite);
    if (kFp8) {
      result.v = reinterpret_cast<uint8_t*>(base + v);
      result.v_scale = floats(v_scale), result.v_exponents = floats(v_exponents),
      result.v_nonfinite = counts(v_nonfinite);
      result.v_mean = floats(v_mean);
    }
    return result;
  }

 private:
  int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += (size + 255) / 256 * 256;
    return at;
  }
};

}  // namespace sm90_int8
}  // namespace qf
