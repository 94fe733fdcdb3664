// The XLA FFI handler of all kernels. The program contains the kernel's struct, packed at lowering, the offsets of the
// fields for the addresses of operands and results, and, if sizes were not yet known, which fields to compute from the
// arrays' extents. Built if jaxlib's headers are found.

#include <pybind11/pybind11.h>

namespace py = pybind11;

#ifdef QF_WITH_XLA

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "op_layouts.h"
#include "xla_registry.h"

namespace ffi = xla::ffi;

namespace {

using Words = ffi::Span<const int64_t>;

struct CallAttributes {
  std::string_view kernel;  // registry key
  std::string_view takes;   // the struct's name
  Words params;             // its bytes, as 64-bit words
  Words pointers;           // offsets of the fields that get the addresses of operands, then of results
  Words num_bytes;          // of the same arrays; -1: not known at lowering
  // Tuples [offset, bytes of the field (4 or 8), count, count times (array, dimension)]: the field is the product of
  // the extents. Arrays are counted as in `pointers`; dimension ~d stands for the extent of d minus 1.
  Words sizes;
  // Tuples [offset, array, dimension]: the field, of 4 bytes, is limited to the extent.
  Words bounds;
};

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(CallAttributes, StructMember<std::string_view>("kernel"),
                                      StructMember<std::string_view>("takes"), StructMember<Words>("params"),
                                      StructMember<Words>("pointers"), StructMember<Words>("num_bytes"),
                                      StructMember<Words>("sizes"), StructMember<Words>("bounds"));

namespace {

// Results other than the kernel's outputs: its workspace, which is the last result.
constexpr size_t kExtraResults = 1;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// Operands, then results, without the workspace.
class Arrays {
 public:
  Arrays(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results)
      : operands_(operands), results_(results) {}

  size_t count() const { return operands_.size() + results_.size() - kExtraResults; }

  ffi::AnyBuffer get(size_t i) const {
    return i < operands_.size() ? *operands_.get<ffi::AnyBuffer>(i)
                                : **results_.get<ffi::AnyBuffer>(i - operands_.size());
  }

  // dimension: as in `sizes`.
  int64_t extent(int64_t array, int64_t dimension) const {
    if (array < 0 || static_cast<size_t>(array) >= count())
      refuse("a size is taken from array " + std::to_string(array) + "; allowed: 0 to " + std::to_string(count() - 1));
    const auto dims = get(static_cast<size_t>(array)).dimensions();
    const uint64_t d = static_cast<uint64_t>(dimension < 0 ? ~dimension : dimension);
    if (d >= dims.size())
      refuse("a size is taken from dimension " + std::to_string(d) + " of array " + std::to_string(array) +
             "; allowed: " + std::to_string(dims.size()) + " dimensions");
    return dims[d] - (dimension < 0 ? 1 : 0);
  }

  ffi::AnyBuffer workspace() const { return **results_.get<ffi::AnyBuffer>(results_.size() - 1); }

 private:
  const ffi::RemainingArgs& operands_;
  const ffi::RemainingRets& results_;
};

// Reads tuples from a flat list, one number at a time.
class Tuples {
 public:
  Tuples(const char* name, Words words) : name_(name), words_(words) {}

  bool more() const { return at_ < words_.size(); }

  int64_t next() {
    if (!more()) refuse(std::string("`") + name_ + "` ends within a tuple");
    return words_[at_++];
  }

 private:
  const char* name_;
  Words words_;
  size_t at_ = 0;
};

// Returns `offset`; throws if no field of the given kind begins there.
size_t field_at(const qflash::OpLayout& layout, int64_t offset, char kind) {
  if (layout.kind_at(offset) != kind)
    refuse(std::string(layout.name) + " has no field of kind '" + kind + "' at offset " + std::to_string(offset));
  return static_cast<size_t>(offset);
}

int32_t checked_int32(const qflash::OpLayout& layout, size_t offset, int64_t value) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max())
    refuse(layout.name_at(offset) + " is " + std::to_string(value) + "; allowed: 0 to 2^31 - 1");
  return static_cast<int32_t>(value);
}

void set_pointers(qflash::OpParams& params, const CallAttributes& a, const Arrays& arrays) {
  if (arrays.count() != a.pointers.size() || a.num_bytes.size() != a.pointers.size())
    refuse("the program has other operands and results than it names");
  for (size_t i = 0; i < a.pointers.size(); ++i) {
    const ffi::AnyBuffer buffer = arrays.get(i);
    const int64_t wanted = a.num_bytes[i], found = static_cast<int64_t>(buffer.size_bytes());
    if (wanted != -1 && wanted != found)
      refuse("array " + std::to_string(i) + " has " + std::to_string(found) +
             " bytes; allowed: " + std::to_string(wanted) + ", as the program was lowered for");
    params.set_pointer(field_at(params.layout(), a.pointers[i], 'P'), buffer.untyped_data());
  }
}

void set_sizes(qflash::OpParams& params, const CallAttributes& a, const Arrays& arrays) {
  const qflash::OpLayout& layout = params.layout();
  for (Tuples tuples("sizes", a.sizes); tuples.more();) {
    const int64_t offset = tuples.next(), bytes = tuples.next(), factors = tuples.next();
    if (bytes != 4 && bytes != 8) refuse("a size has " + std::to_string(bytes) + " bytes; allowed: 4 or 8");
    const size_t field = field_at(layout, offset, bytes == 4 ? 'i' : 'q');
    int64_t product = 1;
    for (int64_t i = 0; i < factors; ++i) {
      const int64_t array = tuples.next(), dimension = tuples.next();
      if (__builtin_mul_overflow(product, arrays.extent(array, dimension), &product))
        refuse(layout.name_at(field) + " is past what 64 bits count");
    }
    if (bytes == 4)
      params.set(field, checked_int32(layout, field, product));
    else
      params.set(field, product);
  }
}

void set_bounds(qflash::OpParams& params, const CallAttributes& a, const Arrays& arrays) {
  for (Tuples tuples("bounds", a.bounds); tuples.more();) {
    const size_t field = field_at(params.layout(), tuples.next(), 'i');
    const int64_t array = tuples.next(), dimension = tuples.next();
    const int64_t bounded = std::min<int64_t>(params.get<int32_t>(field), arrays.extent(array, dimension));
    params.set(field, checked_int32(params.layout(), field, bounded));
  }
}

// The workspace is a result of the custom call, not scratch memory allocated here: a command buffer replays the launch
// with the same addresses, and only XLA's own buffers are still valid then.
void set_workspace(qflash::OpParams& params, const qflash::KernelAddresses& kernel, const CallAttributes& a,
                   ffi::AnyBuffer workspace) {
  if (!kernel.functions.workspace) return;
  const int64_t needed = kernel.functions.workspace_bytes(params.data());
  if (needed > static_cast<int64_t>(workspace.size_bytes()))
    refuse("this program was lowered with a workspace of " + std::to_string(workspace.size_bytes()) +
           " bytes, kernel " + std::string(a.kernel) + " needs " + std::to_string(needed) + " here: lower it again");
  params.set_workspace(workspace.untyped_data(), needed);
}

ffi::Error run(void* stream, const CallAttributes& a, const ffi::RemainingArgs& operands,
               const ffi::RemainingRets& results) {
  return qflash::guarded([&] {
    const qflash::KernelAddresses kernel = qflash::registry().get(a.kernel, a.takes);
    const qflash::OpLayout* layout = qflash::find_op_layout(a.takes);
    if (!layout) refuse("no kernel takes a struct " + std::string(a.takes));
    if (results.size() < kExtraResults) refuse("the program has no result for the workspace");
    const Arrays arrays(operands, results);
    qflash::OpParams params(*layout, a.params.begin(), a.params.size() * sizeof(int64_t));
    set_pointers(params, a, arrays);
    set_sizes(params, a, arrays);
    set_bounds(params, a, arrays);
    set_workspace(params, kernel, a, arrays.workspace());
    return qflash::error_of(kernel.functions.run(params.data(), stream), kernel.functions.text());
  });
}

ffi::Error run_cpu(const CallAttributes& a, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return run(nullptr, a, operands, results);
}

ffi::Error run_cuda(cudaStream_t stream, const CallAttributes& a, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  return run(stream, a, operands, results);
}

XLA_FFI_DEFINE_HANDLER(kRunCpu, run_cpu, ffi::Ffi::Bind().Attrs<CallAttributes>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER(
    kRunCuda, run_cuda,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Attrs<CallAttributes>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void bind_xla_call(py::module_& module) {
  module.def(
      "xla_targets",
      [] {
        py::list targets;  // (name, XLA platform, handler)
        targets.append(py::make_tuple("qflash_call", "cpu", qflash::capsule_of(kRunCpu)));
        targets.append(py::make_tuple("qflash_call", "CUDA", qflash::capsule_of(kRunCuda)));
        return targets;
      },
      "The XLA FFI handlers to register.");
  module.def(
      "register_xla_kernel",
      [](const std::string& key, uintptr_t entry, uintptr_t status_text, uintptr_t workspace, const std::string& takes,
         uintptr_t context) { qflash::registry().add(key, {{entry, status_text, workspace, context}, takes}); },
      py::arg("key"), py::arg("entry"), py::arg("status_text"), py::arg("workspace"), py::arg("takes"),
      py::arg("context") = 0);
  module.def(
      "set_xla_resolver", [](py::object resolver) { qflash::registry().set_resolver(std::move(resolver)); },
      "Called with a key the registry does not know; it must register it or raise.");
}

#else

void bind_xla_call(py::module_&) {}

#endif  // QF_WITH_XLA
