#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <utility>

namespace qf {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kKeptBytes = size_t(64) << 20;

// Large buffers use huge pages: tiles are accessed with long strides, and misses of the address-translation cache cost
// more than the cache misses themselves, above all in virtual machines.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }

  void* reserve(size_t bytes) {
    if (bytes == 0) bytes = 1;  // no bytes have an address too: NULL means no memory
    if (bytes <= bytes_) return data_;
    clear();
    const size_t unit = bytes >= kHugePage / 4 ? kHugePage : kPage;
    bytes = (bytes + unit - 1) / unit * unit;
    data_ = std::aligned_alloc(unit, bytes);
    if (!data_) return nullptr;
    bytes_ = bytes;
#if defined(MADV_HUGEPAGE)
    if (unit == kHugePage) madvise(data_, bytes_, MADV_HUGEPAGE);  // a hint: failure changes nothing
#endif
    return data_;
  }

  void clear() {
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
  }

  size_t bytes() const { return bytes_; }

  void swap(void*& data, size_t& bytes) {
    std::swap(data_, data);
    std::swap(bytes_, bytes);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

thread_local Buffer task_buffer;
thread_local Buffer call_buffer;

}  // namespace

void* thread_scratch(size_t bytes) { return task_buffer.reserve(bytes); }

void* call_scratch(size_t bytes) { return call_buffer.reserve(bytes); }

void release_call_scratch() {
  if (call_buffer.bytes() > kKeptBytes) call_buffer.clear();
}

ScratchAside::ScratchAside() : task_{nullptr, 0}, call_{nullptr, 0} {
  task_buffer.swap(task_.data, task_.bytes);
  call_buffer.swap(call_.data, call_.bytes);
}

ScratchAside::~ScratchAside() {
  task_buffer.swap(task_.data, task_.bytes);
  call_buffer.swap(call_.data, call_.bytes);
  std::free(task_.data);
  std::free(call_.data);
}

}  // namespace qf
