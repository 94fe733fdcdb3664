#include "op_layouts.h"

#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

namespace qflash {
namespace {

template <class T>
constexpr char kind_of() {
  if (std::is_pointer_v<T>) return 'P';
  if (std::is_same_v<T, int32_t>) return 'i';
  if (std::is_same_v<T, int64_t>) return 'q';
  if (std::is_same_v<T, uint64_t>) return 'Q';
  if (std::is_same_v<T, float>) return 'f';
  return '?';
}

// Whether the fields follow each other with no more space between them than alignment needs: none was left out.
template <size_t N>
constexpr bool complete(const OpField (&fields)[N], size_t struct_bytes) {
  size_t end = 0;
  for (const OpField& field : fields) {
    if (field.kind == '?' || field.offset != (end + field.bytes - 1) / field.bytes * field.bytes) return false;
    end = field.offset + field.bytes;
  }
  return (end + 7) / 8 * 8 == struct_bytes && struct_bytes <= kMostOpBytes;
}

// `S` names the struct whose table is being written.
#define QF_FIELD(field) {#field, offsetof(S, field), sizeof(S{}.field), kind_of<decltype(S{}.field)>()}
#define QF_TENSOR(field) \
  QF_FIELD(field.data), QF_FIELD(field.stride_b), QF_FIELD(field.stride_t), QF_FIELD(field.stride_h)
#define QF_ROPE(field)                                                                                  \
  QF_FIELD(field.cos), QF_FIELD(field.sin), QF_FIELD(field.positions_q), QF_FIELD(field.positions_k),   \
      QF_FIELD(field.stride_positions_q_b), QF_FIELD(field.stride_positions_k_b), QF_FIELD(field.rows), \
      QF_FIELD(field.rotary_dim), QF_FIELD(field.interleaved), QF_FIELD(field.reserved)
#define QF_ATTENTION(field)                                                                                          \
  QF_FIELD(field.struct_bytes), QF_FIELD(field.dtype), QF_FIELD(field.precision), QF_FIELD(field.batch),             \
      QF_FIELD(field.q_len), QF_FIELD(field.k_len), QF_FIELD(field.q_heads), QF_FIELD(field.kv_heads),               \
      QF_FIELD(field.head_dim), QF_FIELD(field.window_left), QF_FIELD(field.window_right), QF_FIELD(field.scale),    \
      QF_FIELD(field.softcap), QF_FIELD(field.num_threads), QF_TENSOR(field.q), QF_TENSOR(field.k),                  \
      QF_TENSOR(field.v), QF_TENSOR(field.out), QF_FIELD(field.lse), QF_FIELD(field.lse_stride_b),                   \
      QF_FIELD(field.lse_stride_h), QF_FIELD(field.kv_lens), QF_FIELD(field.cu_seqlens_q),                           \
      QF_FIELD(field.cu_seqlens_k), QF_ROPE(field.rope), QF_FIELD(field.workspace), QF_FIELD(field.workspace_bytes), \
      QF_FIELD(field.total_q), QF_FIELD(field.total_k)
#define QF_SCALES(field)                                                                             \
  QF_FIELD(field.scale), QF_FIELD(field.zero_point), QF_FIELD(field.sums), QF_FIELD(field.stride_b), \
      QF_FIELD(field.stride_h), QF_FIELD(field.group), QF_FIELD(field.reserved)

struct Quantize {
  using S = QfQuantizeParams;
  static constexpr OpField kFields[] = {
      QF_FIELD(struct_bytes), QF_FIELD(dtype),          QF_FIELD(batch),        QF_FIELD(length),
      QF_FIELD(heads),        QF_FIELD(head_dim),       QF_FIELD(granularity),  QF_FIELD(group),
      QF_FIELD(symmetric),    QF_FIELD(rounding),       QF_FIELD(num_threads),  QF_FIELD(smooth),
      QF_FIELD(reserved),     QF_FIELD(queries),        QF_FIELD(seed),         QF_TENSOR(x),
      QF_TENSOR(values),      QF_FIELD(scale),          QF_FIELD(zero_point),   QF_FIELD(sums),
      QF_FIELD(mean),         QF_FIELD(lens),           QF_FIELD(cu_seqlens),   QF_FIELD(total),
      QF_ROPE(rope),          QF_FIELD(key_lens),       QF_FIELD(cu_seqlens_k), QF_FIELD(key_length),
      QF_FIELD(lift_heads),   QF_FIELD(lift_mean),      QF_FIELD(lift),         QF_FIELD(wild),
      QF_FIELD(workspace),    QF_FIELD(workspace_bytes)};
};

struct Dequantize {
  using S = QfDequantizeParams;
  static constexpr OpField kFields[] = {
      QF_FIELD(struct_bytes), QF_FIELD(dtype),       QF_FIELD(batch), QF_FIELD(length),     QF_FIELD(heads),
      QF_FIELD(head_dim),     QF_FIELD(granularity), QF_FIELD(group), QF_FIELD(symmetric),  QF_FIELD(num_threads),
      QF_TENSOR(values),      QF_TENSOR(out),        QF_FIELD(scale), QF_FIELD(zero_point), QF_FIELD(mean)};
};

struct Int8Attention {
  using S = QfInt8AttnParams;
  static constexpr OpField kFields[] = {QF_FIELD(struct_bytes), QF_FIELD(reserved),  QF_ATTENTION(attn),
                                        QF_SCALES(q_scales),    QF_SCALES(k_scales), QF_SCALES(v_scales),
                                        QF_FIELD(lift),         QF_FIELD(k_mean),    QF_FIELD(k_wild)};
};

struct KvAttention {
  using S = QfKvAttnParams;
  static constexpr OpField kFields[] = {
      QF_FIELD(struct_bytes), QF_FIELD(rounding),  QF_FIELD(seed),      QF_ATTENTION(attn), QF_FIELD(kv.k),
      QF_FIELD(kv.k_scale),   QF_FIELD(kv.k_mean), QF_FIELD(kv.k_wild), QF_FIELD(kv.v),     QF_FIELD(kv.v_scale),
      QF_FIELD(kv.v_lift),    QF_FIELD(kv.v_wild), QF_FIELD(kv.v_mean)};
};

struct Int8Matmul {
  using S = QfInt8MatmulParams;
  static constexpr OpField kFields[] = {QF_FIELD(struct_bytes),
                                        QF_FIELD(out_dtype),
                                        QF_FIELD(m),
                                        QF_FIELD(n),
                                        QF_FIELD(k),
                                        QF_FIELD(a),
                                        QF_FIELD(b),
                                        QF_FIELD(a_stride_m),
                                        QF_FIELD(b_stride_k),
                                        QF_FIELD(b_stride_n),
                                        QF_FIELD(a_scale),
                                        QF_FIELD(b_scale),
                                        QF_FIELD(a_scale_stride),
                                        QF_FIELD(b_scale_stride),
                                        QF_FIELD(bias),
                                        QF_FIELD(out),
                                        QF_FIELD(out_stride_m),
                                        QF_FIELD(num_threads),
                                        QF_FIELD(reserved),
                                        QF_FIELD(workspace),
                                        QF_FIELD(workspace_bytes)};
};

struct Rows {
  using S = QfRowsParams;
  static constexpr OpField kFields[] = {
      QF_FIELD(struct_bytes), QF_FIELD(dtype), QF_FIELD(rows),       QF_FIELD(columns), QF_FIELD(x),
      QF_FIELD(x_stride),     QF_FIELD(out),   QF_FIELD(out_stride), QF_FIELD(scale),   QF_FIELD(eps),
      QF_FIELD(weight),       QF_FIELD(bias),  QF_FIELD(mean),       QF_FIELD(rstd),    QF_FIELD(num_threads),
      QF_FIELD(reserved)};
};

struct CrossEntropy {
  using S = QfCrossEntropyParams;
  static constexpr OpField kFields[] = {
      QF_FIELD(struct_bytes),  QF_FIELD(dtype),   QF_FIELD(rows),         QF_FIELD(columns),    QF_FIELD(logits),
      QF_FIELD(logits_stride), QF_FIELD(targets), QF_FIELD(ignore_index), QF_FIELD(smoothing),  QF_FIELD(losses),
      QF_FIELD(lse),           QF_FIELD(total),   QF_FIELD(mean),         QF_FIELD(num_threads)};
};

#undef QF_FIELD
#undef QF_TENSOR
#undef QF_ROPE
#undef QF_ATTENTION
#undef QF_SCALES

template <class Table>
OpLayout layout_of(const char* name) {
  static_assert(complete(Table::kFields, sizeof(typename Table::S)),
                "a struct of qflash_ops.h has fields that its table here does not list in order");
  return {name, sizeof(typename Table::S), Table::kFields, std::size(Table::kFields)};
}

}  // namespace

const OpField* OpLayout::find(std::string_view field) const {
  for (size_t i = 0; i < count; ++i)
    if (field == fields[i].name) return &fields[i];
  return nullptr;
}

const std::vector<OpLayout>& op_layouts() {
  static const auto* layouts = new std::vector<OpLayout>{
      layout_of<Quantize>("QfQuantizeParams"),        layout_of<Dequantize>("QfDequantizeParams"),
      layout_of<Int8Attention>("QfInt8AttnParams"),   layout_of<KvAttention>("QfKvAttnParams"),
      layout_of<Int8Matmul>("QfInt8MatmulParams"),    layout_of<Rows>("QfRowsParams"),
      layout_of<CrossEntropy>("QfCrossEntropyParams")};
  return *layouts;
}

const OpLayout* find_op_layout(std::string_view name) {
  for (const OpLayout& layout : op_layouts())
    if (name == layout.name) return &layout;
  return nullptr;
}

OpParams::OpParams(const OpLayout& layout, const void* data, size_t bytes) : layout_(&layout) {
  if (bytes != layout.bytes)
    throw std::invalid_argument(std::string(layout.name) + " was given as " + std::to_string(bytes) +
                                " bytes; allowed: " + std::to_string(layout.bytes));
  std::memcpy(bytes_, data, bytes);
}

void OpParams::set_pointer(size_t offset, const void* pointer) {
  std::memcpy(bytes_ + offset, &pointer, sizeof pointer);
}

void OpParams::set_threads(int32_t threads) {
  for (const char* name : {"num_threads", "attn.num_threads"})
    if (const OpField* field = layout_->find(name)) std::memcpy(bytes_ + field->offset, &threads, sizeof threads);
}

void OpParams::set_workspace(const void* workspace, int64_t bytes) {
  for (const auto& [pointer, size] :
       {std::pair{"workspace", "workspace_bytes"}, std::pair{"attn.workspace", "attn.workspace_bytes"}})
    if (const OpField* field = layout_->find(pointer)) {
      set_pointer(field->offset, workspace);
      std::memcpy(bytes_ + layout_->find(size)->offset, &bytes, sizeof bytes);
    }
}

}  // namespace qflash
