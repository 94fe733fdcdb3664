// Addresses of the tokens of k or v: rows a stride apart, or pages of such rows, found in a table.
#pragma once

#include "rows.h"
#include "sizes.h"

namespace qf {
namespace QF_ISA {

// Replaces tokens that no query sees: their pages may be anywhere or missing.
alignas(64) static const float kZeroRow[kMaxHeadDim] = {};

// k or v of one sequence and head. Divisions and look-ups are done once per run, a piece of one page; without pages all
// tokens are one run.
class KvRows {
 public:
  KvRows(const QfAttnParams& p, const Sequence& s, const QfTensor& tensor, const QfScales& scales, int32_t dtype,
         int64_t head)
      : dtype_(dtype), bytes_(dtype == QF_I8 ? 1 : element_bytes(dtype)), dim_(p.head_dim) {
    data_ = static_cast<const char*>(tensor.data) + head * tensor.stride_h * bytes_;
    stride_ = tensor.stride_t * bytes_;
    page_stride_ = tensor.stride_b * bytes_;
    if (!p.kv.page_size) {
      data_ += s.batch * page_stride_ + s.first_k * stride_;
      return;
    }
    table_ = p.kv.page_table + s.batch * p.kv.page_table_stride;
    page_size_ = uint32_t(p.kv.page_size);
    needed_ = needed_keys(p, s);
    if (dtype == QF_I8) scales_ = scales.scale + head * scales.stride_h;
    scales_page_stride_ = scales.stride_b;
  }

  // Calls visit(i, row, scale) for tokens first + i, i in [0, count). scale: of int8 elements; otherwise 1.
  template <class Visit>
  __attribute__((always_inline)) void each(int64_t first, int count, Visit visit) const {
    if (!table_) {
      const char* row = address(first);
      for (int i = 0; i < count; i++, row += stride_) visit(i, row, 1.0f);
      return;
    }
    for (int i = 0, n; i < count; i += n) {
      n = int(run(first + i, count - i));
      const bool needed = seen(first + i);
      const int64_t step = needed ? stride_ : 0;
      const char* row = needed ? address(first + i) : reinterpret_cast<const char*>(kZeroRow);
      const float* scale = !scales_ ? nullptr : needed ? scale_address(first + i) : kZeroRow;
      for (int j = 0; j < n; j++, row += step) visit(i + j, row, scale ? scale[needed ? j : 0] : 1.0f);
    }
  }

  // How many of the tokens [token, token + most), from the first on, are stride() apart.
  int64_t run(int64_t token, int64_t most) const {
    if (!table_) return most;
    int64_t n = page_size_ - uint32_t(token) % page_size_;
    if (token < needed_.begin && token + n > needed_.begin) n = needed_.begin - token;
    if (token < needed_.end && token + n > needed_.end) n = needed_.end - token;
    return n < most ? n : most;
  }

  const char* address(int64_t token) const {
    if (!table_) return data_ + token * stride_;
    return data_ + table_[uint32_t(token) / page_size_] * page_stride_ + uint32_t(token) % page_size_ * stride_;
  }

  // A row as float32: in place when it already is, else in `buffer`.
  const float* floats(const char* row, float scale, float* buffer) const {
    if (dtype_ == QF_F32) return reinterpret_cast<const float*>(row);
    if (dtype_ == QF_I8)
      load_scaled(buffer, reinterpret_cast<const int8_t*>(row), scale, dim_);
    else
      load_row(buffer, row, dtype_, dim_);
    return buffer;
  }

  int64_t stride() const { return stride_; }  // in bytes
  int64_t row_bytes() const { return dim_ * bytes_; }

 private:
  bool seen(int64_t token) const { return token >= needed_.begin && token < needed_.end; }
  const float* scale_address(int64_t token) const {
    return scales_ + table_[uint32_t(token) / page_size_] * scales_page_stride_ + uint32_t(token) % page_size_;
  }

  const char* data_;
  int64_t stride_, page_stride_;
  const float* scales_ = nullptr;
  int64_t scales_page_stride_ = 0;
  const int32_t* table_ = nullptr;  // NULL: no pages
  uint32_t page_size_ = 0;
  KeyRange needed_{0, 0};
  const int32_t dtype_;
  const int64_t bytes_;  // of an element
  const int dim_;
};

static inline KvRows key_rows(const QfAttnParams& p, const Sequence& s, int64_t head) {
  return KvRows(p, s, p.kv.k, p.kv.k_scales, p.kv.k_dtype, head);
}
static inline KvRows value_rows(const QfAttnParams& p, const Sequence& s, int64_t head) {
  return KvRows(p, s, p.kv.v, p.kv.v_scales, p.kv.v_dtype, head);
}

}  // namespace QF_ISA
}  // namespace qf
