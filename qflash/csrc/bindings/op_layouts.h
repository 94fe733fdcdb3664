// Where each field of an operation's struct lies, told by the compiler: Python fills the structs by these names, so
// the header is the one place that says what they look like.
#ifndef QFLASH_BINDINGS_OP_LAYOUTS_H_
#define QFLASH_BINDINGS_OP_LAYOUTS_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "qflash_ops.h"

namespace qflash {

// `kind` is the letter of Python's struct module for the field's type.
struct OpField {
  const char* name;
  size_t offset, bytes;
  char kind;
};

struct OpLayout {
  const char* name;  // of the struct
  size_t bytes;
  const OpField* fields;
  size_t count;

  const OpField* find(std::string_view field) const;
};

// Every layout, and the one of a struct; null when there is none of that name.
const std::vector<OpLayout>& op_layouts();
const OpLayout* find_op_layout(std::string_view name);

constexpr size_t kMostOpBytes = 1024;

// A struct of an operation, by value: the bytes a call was prepared with, and what changes from call to call.
class OpParams {
 public:
  // Throws std::invalid_argument when `bytes` is not the size of the struct.
  OpParams(const OpLayout& layout, const void* data, size_t bytes);

  const void* data() const { return bytes_; }
  void set_pointer(size_t offset, const void* pointer);
  // Fields that not every struct has; setting one that is absent does nothing.
  void set_threads(int32_t threads);
  void set_workspace(const void* workspace, int64_t bytes);

 private:
  const OpLayout* layout_;
  alignas(16) unsigned char bytes_[kMostOpBytes];
};

using OpEntry = int (*)(const void*, void*);
using OpWorkspaceBytes = int64_t (*)(const void*);

}  // namespace qflash

#endif  // QFLASH_BINDINGS_OP_LAYOUTS_H_
