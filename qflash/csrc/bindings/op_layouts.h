// The offset of each field of an operation's struct, as the compiler has it: Python fills the structs by field name, so
// only the headers define their layout.
#ifndef QFLASH_BINDINGS_OP_LAYOUTS_H_
#define QFLASH_BINDINGS_OP_LAYOUTS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "qflash_ops.h"

namespace qflash {

// `kind` is the letter of Python's struct module for the field's type. Fields of nested structs have dotted names, such
// as "kv.k.data".
struct OpField {
  std::string name;
  size_t offset, bytes;
  char kind;
};

constexpr size_t kNoField = size_t(-1);

struct OpLayout {
  const char* name;  // of the struct
  size_t bytes;
  std::vector<OpField> fields;
  // Offsets of what changes from call to call in addition to the arrays; kNoField if the struct has no such field.
  size_t threads, workspace, workspace_bytes;

  const OpField* find(std::string_view field) const;
  // The kind of the field that begins at `offset`, and its name; 0 and "" if none does.
  char kind_at(int64_t offset) const {
    const auto at = static_cast<uint64_t>(offset);
    return at < bytes && at % kFieldAlignment == 0 ? kinds[at / kFieldAlignment] : char(0);
  }
  std::string name_at(size_t offset) const;

  static constexpr size_t kFieldAlignment = 4;
  std::vector<char> kinds;  // by offset / kFieldAlignment
};

// All layouts, and the layout of one struct; null if there is none of that name.
const std::vector<OpLayout>& op_layouts();
const OpLayout* find_op_layout(std::string_view name);

// Sixteen hexadecimal digits that change whenever a struct does. They distinguish programs and libraries that outlive a
// process.
const std::string& abi();

constexpr size_t kMostOpBytes = 1024;

// A struct of an operation, by value: the bytes a call was prepared with, plus what changes from call to call.
class OpParams {
 public:
  // Throws std::invalid_argument when `bytes` is not the size of the struct.
  OpParams(const OpLayout& layout, const void* data, size_t bytes);
  OpParams(const OpParams& other) : layout_(other.layout_) { std::memcpy(bytes_, other.bytes_, layout_->bytes); }
  OpParams& operator=(const OpParams&) = delete;

  const OpLayout& layout() const { return *layout_; }
  const void* data() const { return bytes_; }
  void set_pointer(size_t offset, const void* pointer) { set(offset, pointer); }
  // Setting a field that the struct lacks does nothing.
  void set_threads(int32_t threads) {
    if (layout_->threads != kNoField) set(layout_->threads, threads);
  }
  void set_workspace(const void* workspace, int64_t bytes) {
    if (layout_->workspace == kNoField) return;
    set(layout_->workspace, workspace);
    set(layout_->workspace_bytes, bytes);
  }
  // The caller has checked that the struct has a field of this type at `offset`.
  template <class T>
  void set(size_t offset, T value) {
    std::memcpy(bytes_ + offset, &value, sizeof value);
  }
  template <class T>
  T get(size_t offset) const {
    T value;
    std::memcpy(&value, bytes_ + offset, sizeof value);
    return value;
  }

 private:
  const OpLayout* layout_;
  alignas(16) unsigned char bytes_[kMostOpBytes];
};

}  // namespace qflash

#endif  // QFLASH_BINDINGS_OP_LAYOUTS_H_
