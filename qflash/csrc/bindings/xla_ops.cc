// The XLA FFI handler of every operation beside attention. The program carries the operation's struct, packed when it
// was lowered, and where in it the addresses of operands and results belong.

#include <pybind11/pybind11.h>

#ifdef QF_WITH_XLA

#include <string>
#include <string_view>

#include "op_layouts.h"
#include "xla_registry.h"

namespace py = pybind11;
namespace ffi = xla::ffi;

namespace {

struct OpAttributes {
  std::string_view kernel;             // registry key
  std::string_view takes;              // the struct's name
  ffi::Span<const int64_t> params;     // its bytes, as words
  ffi::Span<const int64_t> pointers;   // offsets: of operands, then of results
  ffi::Span<const int64_t> num_bytes;  // of the same arrays
};

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(OpAttributes, StructMember<std::string_view>("kernel"),
                                      StructMember<std::string_view>("takes"),
                                      StructMember<ffi::Span<const int64_t>>("params"),
                                      StructMember<ffi::Span<const int64_t>>("pointers"),
                                      StructMember<ffi::Span<const int64_t>>("num_bytes"));

namespace {

// The results that are not the operation's: its workspace, the last one.
constexpr size_t kExtraResults = 1;

ffi::Error run(void* stream, const OpAttributes& a, const ffi::RemainingArgs& operands,
               const ffi::RemainingRets& results) {
  return qflash::guarded([&] {
    const qflash::KernelAddresses kernel = qflash::registry().get(a.kernel, a.takes);
    const qflash::OpLayout* layout = qflash::find_op_layout(a.takes);
    if (!layout) throw std::invalid_argument("no operation takes a struct " + std::string(a.takes));
    qflash::OpParams p(*layout, a.params.begin(), a.params.size() * sizeof(int64_t));
    const size_t count = a.pointers.size();
    if (operands.size() + results.size() != count + kExtraResults || a.num_bytes.size() != count)
      throw std::invalid_argument("the program has other operands and results than it names");
    for (size_t i = 0; i < count; ++i) {
      const ffi::AnyBuffer buffer =
          i < operands.size() ? *operands.get<ffi::AnyBuffer>(i) : **results.get<ffi::AnyBuffer>(i - operands.size());
      if (static_cast<int64_t>(buffer.size_bytes()) != a.num_bytes[i] || a.pointers[i] < 0 ||
          static_cast<size_t>(a.pointers[i]) + sizeof(void*) > layout->bytes)
        throw std::invalid_argument("array " + std::to_string(i) + " is not as the program was lowered for");
      p.set_pointer(a.pointers[i], buffer.untyped_data());
    }
    if (kernel.workspace) {
      const ffi::AnyBuffer workspace = **results.get<ffi::AnyBuffer>(results.size() - 1);
      const int64_t needed = reinterpret_cast<qflash::OpWorkspaceBytes>(kernel.workspace)(p.data());
      if (needed > static_cast<int64_t>(workspace.size_bytes()))
        throw std::invalid_argument("this program was lowered with a workspace of " +
                                    std::to_string(workspace.size_bytes()) + " bytes, kernel " + std::string(a.kernel) +
                                    " needs " + std::to_string(needed) + " here: lower it again");
      p.set_workspace(workspace.untyped_data(), needed);
    }
    return qflash::error_of(reinterpret_cast<qflash::OpEntry>(kernel.entry)(p.data(), stream), kernel.status_text);
  });
}

ffi::Error run_cpu(const OpAttributes& a, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return run(nullptr, a, operands, results);
}

ffi::Error run_cuda(cudaStream_t stream, const OpAttributes& a, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  return run(stream, a, operands, results);
}

XLA_FFI_DEFINE_HANDLER(kRunCpu, run_cpu, ffi::Ffi::Bind().Attrs<OpAttributes>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER(
    kRunCuda, run_cuda,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Attrs<OpAttributes>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void bind_xla_ops(py::list& targets) {
  targets.append(py::make_tuple("qflash_op", "cpu", qflash::capsule_of(kRunCpu)));
  targets.append(py::make_tuple("qflash_op", "CUDA", qflash::capsule_of(kRunCuda)));
}

#endif  // QF_WITH_XLA
