#include "op_layouts.h"

#include <cstdio>
#include <iterator>
#include <stdexcept>
#include <type_traits>

namespace qflash {
namespace {

// A member of a struct as declared; `kind` 's': a nested struct with `members`.
struct Member {
  const char* name;
  size_t offset, bytes, alignment;
  char kind;
  const Member* members;
  size_t count;
};

// kMembers: all members of a struct, in order.
template <class S>
struct Table;

template <class T>
constexpr char kind_of() {
  if (std::is_pointer_v<T>) return 'P';
  if (std::is_same_v<T, int32_t>) return 'i';
  if (std::is_same_v<T, int64_t>) return 'q';
  if (std::is_same_v<T, uint64_t>) return 'Q';
  if (std::is_same_v<T, float>) return 'f';
  return '?';
}

// Whether the members leave no more space between them than alignment requires, so that none is missing.
template <size_t N>
constexpr bool complete(const Member (&members)[N], size_t struct_bytes, size_t alignment) {
  size_t end = 0;
  for (const Member& member : members) {
    if (member.kind == '?' || member.offset != (end + member.alignment - 1) / member.alignment * member.alignment)
      return false;
    end = member.offset + member.bytes;
  }
  return (end + alignment - 1) / alignment * alignment == struct_bytes && struct_bytes <= kMostOpBytes;
}

template <class S>
constexpr void check_complete() {
  static_assert(complete(Table<S>::kMembers, sizeof(S), alignof(S)),
                "a struct of qflash.h or qflash_ops.h has members that its table here does not list in order");
}

template <class T>
constexpr Member member(const char* name, size_t offset) {
  if constexpr (std::is_class_v<T>) {
    check_complete<T>();
    return {name, offset, sizeof(T), alignof(T), 's', Table<T>::kMembers, std::size(Table<T>::kMembers)};
  } else {
    return {name, offset, sizeof(T), alignof(T), kind_of<T>(), nullptr, 0};
  }
}

// `S` names the struct whose table is being written.
#define QF_MEMBER(name) member<decltype(S::name)>(#name, offsetof(S, name))
#define QF_TABLE(type, ...)                             \
  template <>                                           \
  struct Table<type> {                                  \
    using S = type;                                     \
    static constexpr Member kMembers[] = {__VA_ARGS__}; \
  }

QF_TABLE(QfTensor, QF_MEMBER(data), QF_MEMBER(stride_b), QF_MEMBER(stride_t), QF_MEMBER(stride_h));

QF_TABLE(QfRope, QF_MEMBER(cos), QF_MEMBER(sin), QF_MEMBER(positions_q), QF_MEMBER(positions_k),
         QF_MEMBER(stride_positions_q_b), QF_MEMBER(stride_positions_k_b), QF_MEMBER(rows), QF_MEMBER(rotary_dim),
         QF_MEMBER(interleaved), QF_MEMBER(reserved));

QF_TABLE(QfScales, QF_MEMBER(scale), QF_MEMBER(zero_point), QF_MEMBER(sums), QF_MEMBER(stride_b), QF_MEMBER(stride_h),
         QF_MEMBER(group), QF_MEMBER(reserved));

QF_TABLE(QfKv, QF_MEMBER(kind), QF_MEMBER(k_dtype), QF_MEMBER(v_dtype), QF_MEMBER(page_size), QF_MEMBER(k),
         QF_MEMBER(v), QF_MEMBER(k_scales), QF_MEMBER(v_scales), QF_MEMBER(k_mean), QF_MEMBER(v_mean),
         QF_MEMBER(k_nonfinite), QF_MEMBER(v_nonfinite), QF_MEMBER(v_exponents), QF_MEMBER(page_table),
         QF_MEMBER(page_table_stride), QF_MEMBER(pages), QF_MEMBER(reserved));

QF_TABLE(QfAttnParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(precision), QF_MEMBER(batch),
         QF_MEMBER(q_len), QF_MEMBER(k_len), QF_MEMBER(q_heads), QF_MEMBER(kv_heads), QF_MEMBER(head_dim),
         QF_MEMBER(window_left), QF_MEMBER(window_right), QF_MEMBER(scale), QF_MEMBER(softcap), QF_MEMBER(num_threads),
         QF_MEMBER(rounding), QF_MEMBER(batch_invariant), QF_MEMBER(seed), QF_MEMBER(q), QF_MEMBER(out), QF_MEMBER(lse),
         QF_MEMBER(lse_stride_b), QF_MEMBER(lse_stride_h), QF_MEMBER(kv_lens), QF_MEMBER(cu_seqlens_q),
         QF_MEMBER(cu_seqlens_k), QF_MEMBER(rope), QF_MEMBER(q_scales), QF_MEMBER(q_dot_mean), QF_MEMBER(sinks),
         QF_MEMBER(kv), QF_MEMBER(workspace), QF_MEMBER(workspace_bytes), QF_MEMBER(total_q), QF_MEMBER(total_k));

QF_TABLE(QfAttnBwdParams, QF_MEMBER(struct_bytes), QF_MEMBER(partial), QF_MEMBER(fwd), QF_MEMBER(dout), QF_MEMBER(dlse),
         QF_MEMBER(dq), QF_MEMBER(dk), QF_MEMBER(dv), QF_MEMBER(dsinks), QF_MEMBER(workspace),
         QF_MEMBER(workspace_bytes), QF_MEMBER(ds_bytes));

QF_TABLE(QfQuantizeKvParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(precision), QF_MEMBER(batch),
         QF_MEMBER(k_len), QF_MEMBER(kv_heads), QF_MEMBER(head_dim), QF_MEMBER(rounding), QF_MEMBER(num_threads),
         QF_MEMBER(reserved), QF_MEMBER(seed), QF_MEMBER(k), QF_MEMBER(v), QF_MEMBER(kv_lens), QF_MEMBER(cu_seqlens_k),
         QF_MEMBER(total_k), QF_MEMBER(rope), QF_MEMBER(kv));

QF_TABLE(QfKvWriteParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(batch), QF_MEMBER(k_len),
         QF_MEMBER(kv_heads), QF_MEMBER(head_dim), QF_MEMBER(columns), QF_MEMBER(num_threads), QF_MEMBER(k),
         QF_MEMBER(v), QF_MEMBER(kv_lens), QF_MEMBER(cu_seqlens_k), QF_MEMBER(total_k), QF_MEMBER(rope), QF_MEMBER(kv));

QF_TABLE(QfQuantizeParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(batch), QF_MEMBER(length),
         QF_MEMBER(heads), QF_MEMBER(head_dim), QF_MEMBER(granularity), QF_MEMBER(group), QF_MEMBER(symmetric),
         QF_MEMBER(rounding), QF_MEMBER(num_threads), QF_MEMBER(smooth), QF_MEMBER(reserved), QF_MEMBER(queries),
         QF_MEMBER(seed), QF_MEMBER(x), QF_MEMBER(values), QF_MEMBER(scale), QF_MEMBER(zero_point), QF_MEMBER(sums),
         QF_MEMBER(mean), QF_MEMBER(lens), QF_MEMBER(cu_seqlens), QF_MEMBER(total), QF_MEMBER(rope),
         QF_MEMBER(key_lens), QF_MEMBER(cu_seqlens_k), QF_MEMBER(key_length), QF_MEMBER(kv_heads), QF_MEMBER(k_mean),
         QF_MEMBER(q_dot_mean), QF_MEMBER(nonfinite), QF_MEMBER(workspace), QF_MEMBER(workspace_bytes));

QF_TABLE(QfDequantizeParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(batch), QF_MEMBER(length),
         QF_MEMBER(heads), QF_MEMBER(head_dim), QF_MEMBER(granularity), QF_MEMBER(group), QF_MEMBER(symmetric),
         QF_MEMBER(num_threads), QF_MEMBER(values), QF_MEMBER(out), QF_MEMBER(scale), QF_MEMBER(zero_point),
         QF_MEMBER(mean));

QF_TABLE(QfLinearParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(out_dtype), QF_MEMBER(bias_dtype),
         QF_MEMBER(activation), QF_MEMBER(num_threads), QF_MEMBER(m), QF_MEMBER(n), QF_MEMBER(k), QF_MEMBER(x),
         QF_MEMBER(w), QF_MEMBER(up), QF_MEMBER(x_stride_m), QF_MEMBER(x_stride_k), QF_MEMBER(w_stride_k),
         QF_MEMBER(w_stride_n), QF_MEMBER(up_stride_k), QF_MEMBER(up_stride_n), QF_MEMBER(x_scale), QF_MEMBER(w_scale),
         QF_MEMBER(up_scale), QF_MEMBER(x_scale_stride), QF_MEMBER(w_scale_stride), QF_MEMBER(up_scale_stride),
         QF_MEMBER(bias), QF_MEMBER(up_bias), QF_MEMBER(residual), QF_MEMBER(residual_stride_m), QF_MEMBER(out),
         QF_MEMBER(out_stride_m), QF_MEMBER(pre), QF_MEMBER(pre_up), QF_MEMBER(workspace), QF_MEMBER(workspace_bytes));

QF_TABLE(QfLinearBwdParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(bias_dtype), QF_MEMBER(activation),
         QF_MEMBER(num_threads), QF_MEMBER(reserved), QF_MEMBER(m), QF_MEMBER(n), QF_MEMBER(k), QF_MEMBER(dout),
         QF_MEMBER(x), QF_MEMBER(w), QF_MEMBER(up), QF_MEMBER(pre), QF_MEMBER(pre_up), QF_MEMBER(dout_stride_m),
         QF_MEMBER(x_stride_m), QF_MEMBER(w_stride_k), QF_MEMBER(w_stride_n), QF_MEMBER(up_stride_k),
         QF_MEMBER(up_stride_n), QF_MEMBER(dx), QF_MEMBER(dw), QF_MEMBER(dup), QF_MEMBER(dbias), QF_MEMBER(dup_bias),
         QF_MEMBER(dresidual), QF_MEMBER(workspace), QF_MEMBER(workspace_bytes));

QF_TABLE(QfMergeParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(b_dtype), QF_MEMBER(batch),
         QF_MEMBER(length), QF_MEMBER(heads), QF_MEMBER(head_dim), QF_MEMBER(num_threads), QF_MEMBER(a), QF_MEMBER(b),
         QF_MEMBER(out), QF_MEMBER(a_lse), QF_MEMBER(b_lse), QF_MEMBER(a_lse_stride_b), QF_MEMBER(a_lse_stride_h),
         QF_MEMBER(a_lse_stride_t), QF_MEMBER(b_lse_stride_b), QF_MEMBER(b_lse_stride_h), QF_MEMBER(b_lse_stride_t),
         QF_MEMBER(lse));

QF_TABLE(QfRopeParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(batch), QF_MEMBER(length), QF_MEMBER(heads),
         QF_MEMBER(head_dim), QF_MEMBER(inverse), QF_MEMBER(num_threads), QF_MEMBER(x), QF_MEMBER(out),
         QF_MEMBER(positions), QF_MEMBER(stride_positions_b), QF_MEMBER(rope));

QF_TABLE(QfRowsParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(rows), QF_MEMBER(columns), QF_MEMBER(x),
         QF_MEMBER(x_stride), QF_MEMBER(out), QF_MEMBER(out_stride), QF_MEMBER(scale), QF_MEMBER(eps),
         QF_MEMBER(weight), QF_MEMBER(bias), QF_MEMBER(mean), QF_MEMBER(rstd), QF_MEMBER(num_threads),
         QF_MEMBER(reserved));

QF_TABLE(QfCrossEntropyParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(rows), QF_MEMBER(columns),
         QF_MEMBER(logits), QF_MEMBER(logits_stride), QF_MEMBER(targets), QF_MEMBER(ignore_index),
         QF_MEMBER(label_smoothing), QF_MEMBER(losses), QF_MEMBER(lse), QF_MEMBER(total), QF_MEMBER(mean),
         QF_MEMBER(num_threads));

QF_TABLE(QfSoftmaxBwdParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(rows), QF_MEMBER(columns),
         QF_MEMBER(out), QF_MEMBER(dout), QF_MEMBER(out_stride), QF_MEMBER(dout_stride), QF_MEMBER(dx),
         QF_MEMBER(dx_stride), QF_MEMBER(scale), QF_MEMBER(num_threads));

QF_TABLE(QfLayerNormBwdParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(rows), QF_MEMBER(columns),
         QF_MEMBER(x), QF_MEMBER(dout), QF_MEMBER(x_stride), QF_MEMBER(dout_stride), QF_MEMBER(weight), QF_MEMBER(mean),
         QF_MEMBER(rstd), QF_MEMBER(dmean), QF_MEMBER(drstd), QF_MEMBER(dx), QF_MEMBER(dx_stride), QF_MEMBER(dweight),
         QF_MEMBER(dbias), QF_MEMBER(num_threads), QF_MEMBER(sums), QF_MEMBER(workspace), QF_MEMBER(workspace_bytes));

QF_TABLE(QfCrossEntropyBwdParams, QF_MEMBER(struct_bytes), QF_MEMBER(dtype), QF_MEMBER(rows), QF_MEMBER(columns),
         QF_MEMBER(logits), QF_MEMBER(logits_stride), QF_MEMBER(targets), QF_MEMBER(lse), QF_MEMBER(dlosses),
         QF_MEMBER(dlse), QF_MEMBER(dtotal), QF_MEMBER(dlogits), QF_MEMBER(dlogits_stride), QF_MEMBER(ignore_index),
         QF_MEMBER(label_smoothing), QF_MEMBER(mean), QF_MEMBER(num_threads), QF_MEMBER(workspace),
         QF_MEMBER(workspace_bytes));

#undef QF_TABLE
#undef QF_MEMBER

void flatten(const std::string& prefix, size_t offset, const Member* members, size_t count,
             std::vector<OpField>& fields) {
  for (const Member* member = members; member != members + count; ++member) {
    const std::string name = prefix + member->name;
    if (member->kind == 's')
      flatten(name + ".", offset + member->offset, member->members, member->count, fields);
    else
      fields.push_back({name, offset + member->offset, member->bytes, member->kind});
  }
}

template <class S>
OpLayout layout_of(const char* name) {
  check_complete<S>();
  OpLayout layout{name, sizeof(S), {}, kNoField, kNoField, kNoField, {}};
  flatten("", 0, Table<S>::kMembers, std::size(Table<S>::kMembers), layout.fields);
  layout.kinds.resize(sizeof(S) / OpLayout::kFieldAlignment);
  for (const OpField& field : layout.fields) layout.kinds[field.offset / OpLayout::kFieldAlignment] = field.kind;
  const auto offset_of = [&](const char* field) {
    const OpField* found = layout.find(field);
    return found ? found->offset : kNoField;
  };
  layout.threads = offset_of("num_threads");
  if (layout.threads == kNoField) layout.threads = offset_of("fwd.num_threads");
  layout.workspace = offset_of("workspace");
  layout.workspace_bytes = offset_of("workspace_bytes");
  return layout;
}

// 64-bit FNV-1a.
uint64_t digest(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace

const OpField* OpLayout::find(std::string_view field) const {
  for (const OpField& candidate : fields)
    if (field == candidate.name) return &candidate;
  return nullptr;
}

std::string OpLayout::name_at(size_t offset) const {
  for (const OpField& field : fields)
    if (offset == field.offset) return field.name;
  return "";
}

const std::vector<OpLayout>& op_layouts() {
  static const auto* layouts = new std::vector<OpLayout>{
      layout_of<QfAttnParams>("QfAttnParams"),
      layout_of<QfAttnBwdParams>("QfAttnBwdParams"),
      layout_of<QfQuantizeKvParams>("QfQuantizeKvParams"),
      layout_of<QfKvWriteParams>("QfKvWriteParams"),
      layout_of<QfQuantizeParams>("QfQuantizeParams"),
      layout_of<QfDequantizeParams>("QfDequantizeParams"),
      layout_of<QfLinearParams>("QfLinearParams"),
      layout_of<QfLinearBwdParams>("QfLinearBwdParams"),
      layout_of<QfMergeParams>("QfMergeParams"),
      layout_of<QfRopeParams>("QfRopeParams"),
      layout_of<QfRowsParams>("QfRowsParams"),
      layout_of<QfCrossEntropyParams>("QfCrossEntropyParams"),
      layout_of<QfSoftmaxBwdParams>("QfSoftmaxBwdParams"),
      layout_of<QfLayerNormBwdParams>("QfLayerNormBwdParams"),
      layout_of<QfCrossEntropyBwdParams>("QfCrossEntropyBwdParams"),
  };
  return *layouts;
}

const OpLayout* find_op_layout(std::string_view name) {
  for (const OpLayout& layout : op_layouts())
    if (name == layout.name) return &layout;
  return nullptr;
}

const std::string& abi() {
  static const auto* text = [] {
    std::string all;
    for (const OpLayout& layout : op_layouts()) {
      all += std::string(layout.name) + ' ' + std::to_string(layout.bytes) + '\n';
      for (const OpField& field : layout.fields)
        all += field.name + ' ' + std::to_string(field.offset) + ' ' + field.kind + '\n';
    }
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(digest(all)));
    return new std::string(digits);
  }();
  return *text;
}

OpParams::OpParams(const OpLayout& layout, const void* data, size_t bytes) : layout_(&layout) {
  if (bytes != layout.bytes)
    throw std::invalid_argument(std::string(layout.name) + " was given as " + std::to_string(bytes) +
                                " bytes; allowed: " + std::to_string(layout.bytes));
  std::memcpy(bytes_, data, bytes);
}

}  // namespace qflash
