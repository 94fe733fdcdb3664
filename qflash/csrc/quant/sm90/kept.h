// K and V as written by the quantization pass of Hopper's INT8 attention: what its device code needs of a QfKv of kind
// QF_KV_KEPT, whether that comes from an earlier call or lies in this call's workspace.
#pragma once

#include "qflash.h"

namespace qf {

constexpr int kKeptKeyGroup = 64;  // keys that share a scale

// Shapes are those of QfKv. All are contiguous.
struct KeptKv {
  int8_t* k;
  float* k_scale;
  float* k_mean;
  int32_t* k_nonfinite;
  uint8_t* v;      // in E4M3; NULL: V is not quantized
  float* v_scale;  // these four only with v
  float* v_exponents;
  int32_t* v_nonfinite;
  float* v_mean;
};

__host__ __device__ inline int64_t kept_width(int head_dim) { return (head_dim + 15) / 16 * 16; }

inline KeptKv kept_of(const QfKv& kv) {
  KeptKv result{};
  result.k = static_cast<int8_t*>(kv.k.data);
  result.k_scale = kv.k_scales.scale, result.k_mean = kv.k_mean, result.k_nonfinite = kv.k_nonfinite;
  if (kv.v_dtype == QF_E4M3) {
    result.v = static_cast<uint8_t*>(kv.v.data);
    result.v_scale = kv.v_scales.scale, result.v_exponents = kv.v_exponents;
    result.v_nonfinite = kv.v_nonfinite, result.v_mean = kv.v_mean;
  }
  return result;
}

// Does `kv` describe exactly what the pass writes? Strides are only checked if an extent makes them matter.
inline bool is_kept(const QfKv& kv, int precision, int dtype, int64_t batch, int64_t k_len, int64_t heads,
                    int head_dim) {
  if (kv.kind != QF_KV_KEPT || kv.k_dtype != QF_I8 || kv.page_size != 0) return false;
  if (kv.v_dtype != (precision == QF_INT8_FP8 ? int(QF_E4M3) : dtype)) return false;
  const int64_t width = kept_width(head_dim), groups = (k_len + kKeptKeyGroup - 1) / kKeptKeyGroup;
  const auto agrees = [](int64_t extent, int64_t stride, int64_t wanted) { return extent <= 1 || stride == wanted; };
  return kv.k_scales.group == kKeptKeyGroup && !kv.k_scales.zero_point && agrees(heads, kv.k.stride_h, width) &&
         agrees(k_len, kv.k.stride_t, heads * width) && agrees(batch, kv.k.stride_b, k_len * heads * width) &&
         agrees(heads, kv.k_scales.stride_h, groups) && agrees(batch, kv.k_scales.stride_b, heads * groups);
}

}  // namespace qf
