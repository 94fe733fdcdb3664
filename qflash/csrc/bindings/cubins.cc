// _native.Cubins: a kernel given as machine code from another compiler, launched through the driver.
//
// A call launches the passes of the first choice whose conditions its struct meets. Grids and conditions are computed
// from fields of the struct; arguments are fields of it, or addresses in the workspace. Python specifies which
// (qflash/triton/launches.py), and compiles a choice when a call first needs it.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <climits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "op_layouts.h"

namespace py = pybind11;

namespace qflash {
namespace {

using Bytes = const unsigned char*;  // of a struct

template <class T>
T field_of(Bytes params, size_t offset) {
  T value;
  std::memcpy(&value, params + offset, sizeof value);
  return value;
}

// A number computed from fields: an expression in postfix order.
class Size {
 public:
  using Code = std::vector<std::pair<std::string, int64_t>>;  // (operation, operand)

  Size(const OpLayout& layout, const Code& code) {
    int depth = 0;
    for (const auto& [name, operand] : code) {
      const Operation operation = operation_called(name);
      depth += operation <= kField ? 1 : -1;
      if (depth < 1 || depth > kMostDepth) throw std::invalid_argument("a size has too few operands, or too many");
      const char kind = operation == kField ? layout.kind_at(operand) : char(0);
      if (operation == kField && (kind == 0 || kind == 'f'))
        throw std::invalid_argument(std::string(layout.name) + " has no whole number at " + std::to_string(operand));
      steps_.push_back({operation, operand, kind});
    }
    if (depth != 1) throw std::invalid_argument("a size is no single number");
  }

  int64_t value(Bytes params) const {
    int64_t stack[kMostDepth];
    int depth = 0;
    for (const Step& step : steps_) {
      if (step.operation == kConstant) {
        stack[depth++] = step.operand;
      } else if (step.operation == kField) {
        const size_t at = static_cast<size_t>(step.operand);
        stack[depth++] = step.kind == 'i' ? field_of<int32_t>(params, at) : field_of<int64_t>(params, at);
      } else {
        const int64_t right = stack[--depth];
        stack[depth - 1] = applied(step.operation, stack[depth - 1], right);
      }
    }
    return stack[0];
  }

 private:
  enum Operation { kConstant, kField, kMultiply, kAdd, kCeilDivide, kMaximum, kUpTo, kMultipleOf };
  struct Step {
    Operation operation;
    int64_t operand;
    char kind;
  };
  static constexpr int kMostDepth = 8;

  static Operation operation_called(const std::string& name) {
    static const char* const names[] = {"constant",    "field",   "multiply", "add",
                                        "ceil_divide", "maximum", "up_to",    "multiple_of"};
    for (int i = 0; i <= kMultipleOf; ++i)
      if (name == names[i]) return static_cast<Operation>(i);
    throw std::invalid_argument("a size has no operation " + name);
  }

  static int64_t applied(Operation operation, int64_t left, int64_t right) {
    switch (operation) {
      case kMultiply:
        return left * right;
      case kAdd:
        return left + right;
      case kCeilDivide:
        return right == 0 ? 0 : (left + right - 1) / right;
      case kMaximum:
        return left > right ? left : right;
      case kUpTo:
        return left <= right;
      default:
        return right != 0 && left % right == 0;
    }
  }

  std::vector<Step> steps_;
};

// Where an argument comes from.
struct Argument {
  enum Source { kField, kHas, kRegion } source;
  size_t at;  // offset of the field, or index of the region
};

struct Pass {
  Size grid;
  std::vector<Argument> arguments;
};

// A pass that the driver has loaded.
struct LoadedPass {
  CuKernel kernel;
  int shared_bytes, threads;
  mutable std::atomic<uint64_t> allowed{0};  // a bit for each device on which its shared memory is allowed
};

struct Choice {
  std::vector<Size> when;
  std::vector<Pass> passes;
  std::atomic<std::vector<std::unique_ptr<LoadedPass>>*> loaded{nullptr};
};

constexpr int kSharedBytesAnyway = 48 * 1024;  // more needs an opt-in
constexpr int kTrailing = 2;                   // Triton's scratch memory for the kernel and for a profiler: none
constexpr size_t kMostArguments = 96;

thread_local std::string failure;

int failed(int status, const std::string& text) {
  failure = text;
  return status;
}

class Cubins {
 public:
  using PassCode = std::pair<Size::Code, std::vector<std::pair<std::string, size_t>>>;
  using ChoiceCode = std::pair<std::vector<Size::Code>, std::vector<PassCode>>;

  // regions: the offset of each in the workspace, then the end of the workspace.
  Cubins(const std::string& takes, const std::vector<ChoiceCode>& choices, const std::vector<Size::Code>& regions,
         py::object compile)
      : layout_(layout_called(takes)), compile_(std::move(compile)) {
    if (choices.empty() || regions.empty()) throw std::invalid_argument("a kernel has a choice and a workspace");
    for (const Size::Code& code : regions) regions_.emplace_back(layout_, code);
    for (const auto& [when, passes] : choices) {
      choices_.push_back(std::make_unique<Choice>());
      for (const Size::Code& code : when) choices_.back()->when.emplace_back(layout_, code);
      for (const auto& [grid, arguments] : passes)
        choices_.back()->passes.push_back({Size(layout_, grid), arguments_of(arguments)});
    }
  }

  // Loads a choice: Python compiles it and the driver loads it, unless that is already done.
  void load(size_t index) {
    if (index >= choices_.size()) throw py::index_error("choice " + std::to_string(index));
    py::gil_scoped_release unlocked;
    if (const int status = loaded(index).first) throw std::runtime_error(failure + " (" + std::to_string(status) + ")");
  }

  int64_t workspace_bytes(Bytes params) const { return regions_.back().value(params); }

  int run(Bytes params, void* stream) {
    const auto [index, choice] = serving(params);
    if (!choice) return failed(QF_UNSUPPORTED, "no choice of this kernel serves the call");
    const auto [status, passes] = loaded(index);
    if (status != 0) return status;
    int device = 0;
    if (const DriverError error = current_device(stream, device); error.status != 0)
      return failed(error.status, error.text);
    for (size_t i = 0; i < passes->size(); ++i)
      if (const int failed_pass = launch(choice->passes[i], *(*passes)[i], params, stream, device)) return failed_pass;
    return QF_OK;
  }

 private:
  using Loaded = std::vector<std::unique_ptr<LoadedPass>>;

  static const OpLayout& layout_called(const std::string& name) {
    const OpLayout* layout = find_op_layout(name);
    if (!layout) throw py::key_error("no operation takes a struct " + name);
    return *layout;
  }

  std::vector<Argument> arguments_of(const std::vector<std::pair<std::string, size_t>>& told) const {
    std::vector<Argument> found;
    for (const auto& [source, at] : told) {
      const bool region = source == "region", has = source == "has";
      if (region ? at + 1 >= regions_.size() : layout_.kind_at(static_cast<int64_t>(at)) == 0)
        throw std::invalid_argument("an argument is no " + source + " at " + std::to_string(at));
      found.push_back({region ? Argument::kRegion : has ? Argument::kHas : Argument::kField, at});
    }
    if (found.size() + kTrailing > kMostArguments) throw std::invalid_argument("a pass has too many arguments");
    return found;
  }

  std::pair<size_t, const Choice*> serving(Bytes params) const {
    for (size_t i = 0; i < choices_.size(); ++i) {
      bool serves = true;
      for (const Size& size : choices_[i]->when) serves = serves && size.value(params) != 0;
      if (serves) return {i, choices_[i].get()};
    }
    return {0, nullptr};
  }

  // Returns (status, passes). Called without the interpreter lock.
  std::pair<int, const Loaded*> loaded(size_t index) {
    Choice& choice = *choices_[index];
    if (const Loaded* ready = choice.loaded.load(std::memory_order_acquire)) return {0, ready};
    const std::lock_guard lock(loading_);
    if (const Loaded* ready = choice.loaded.load(std::memory_order_acquire)) return {0, ready};
    auto passes = std::make_unique<Loaded>();
    for (const auto& [image, name, shared_bytes, threads] : compiled(index)) {
      passes->push_back(std::make_unique<LoadedPass>());
      passes->back()->shared_bytes = shared_bytes, passes->back()->threads = threads;
      const DriverError error = load_kernel(image.data(), name.c_str(), passes->back()->kernel);
      if (error.status != 0) return {failed(error.status, name + ": " + error.text), nullptr};
    }
    if (passes->size() != choice.passes.size()) return {failed(kNoCode, failure), nullptr};
    choice.loaded.store(passes.get(), std::memory_order_release);
    return {0, passes.release()};
  }

  // (machine code, kernel, bytes of shared memory, threads of a block) for each pass. Empty, with `failure` set, if
  // Python raised.
  using Code = std::tuple<std::string, std::string, int, int>;
  std::vector<Code> compiled(size_t index) const {
    const py::gil_scoped_acquire locked;
    try {
      failure = "the compiler gave another number of passes";
      return compile_(index).cast<std::vector<Code>>();
    } catch (py::error_already_set& error) {
      failure = error.what();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    return {};
  }

  int launch(const Pass& pass, const LoadedPass& code, Bytes params, void* stream, int device) const {
    const int64_t blocks = pass.grid.value(params);
    if (blocks == 0) return QF_OK;
    if (blocks < 0 || blocks > INT_MAX)
      return failed(QF_UNSUPPORTED, "a pass would have " + std::to_string(blocks) + " blocks; allowed: up to 2^31 - 1");
    if (const int status = allow_memory(code, device)) return status;
    uint64_t values[kMostArguments];  // of arguments that are not fields
    void* arguments[kMostArguments];
    size_t count = 0;
    for (const Argument& argument : pass.arguments) {
      void* const value = &values[count];
      if (argument.source == Argument::kRegion)
        values[count] = workspace_of(params) + static_cast<uint64_t>(regions_[argument.at].value(params));
      else if (argument.source == Argument::kHas)
        values[count] = field_of<uint64_t>(params, argument.at) != 0;  // its low half is the int32 that is passed
      arguments[count++] =
          argument.source == Argument::kField ? const_cast<unsigned char*>(params) + argument.at : value;
    }
    for (int i = 0; i < kTrailing; ++i) values[count] = 0, arguments[count] = &values[count], ++count;
    const DriverError error =
        launch_kernel(code.kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(code.threads),
                      static_cast<unsigned>(code.shared_bytes), stream, arguments);
    return error.status == 0 ? QF_OK : failed(error.status, error.text);
  }

  uint64_t workspace_of(Bytes params) const {
    return layout_.workspace == kNoField ? 0 : field_of<uint64_t>(params, layout_.workspace);
  }

  static int allow_memory(const LoadedPass& code, int device) {
    const uint64_t bit = uint64_t(1) << (device % 64);
    if (code.shared_bytes <= kSharedBytesAnyway || (code.allowed.load(std::memory_order_relaxed) & bit)) return QF_OK;
    const DriverError error = allow_shared_bytes(code.kernel, code.shared_bytes, device);
    if (error.status != 0) return failed(error.status, error.text);
    if (device < 64) code.allowed.fetch_or(bit, std::memory_order_relaxed);
    return QF_OK;
  }

  static constexpr int kNoCode = 999;  // CUDA_ERROR_UNKNOWN
  const OpLayout& layout_;
  std::vector<Size> regions_;
  std::vector<std::unique_ptr<Choice>> choices_;
  py::object compile_;
  std::mutex loading_;
};

int run_cubins(uintptr_t context, const void* params, void* stream) {
  return reinterpret_cast<Cubins*>(context)->run(static_cast<Bytes>(params), stream);
}

int64_t cubins_workspace(uintptr_t context, const void* params) {
  return reinterpret_cast<Cubins*>(context)->workspace_bytes(static_cast<Bytes>(params));
}

const char* cubins_text(int) { return failure.c_str(); }

}  // namespace
}  // namespace qflash

void bind_cubins(py::module_& module) {
  using qflash::Cubins;
  py::class_<Cubins>(module, "Cubins")
      .def(py::init([](const std::string& takes, const py::sequence& choices, const py::sequence& regions,
                       py::object compile) {
             return std::make_unique<Cubins>(takes, choices.cast<std::vector<Cubins::ChoiceCode>>(),
                                             regions.cast<std::vector<qflash::Size::Code>>(), std::move(compile));
           }),
           py::arg("struct"), py::arg("choices"), py::arg("regions"), py::arg("compile"))
      .def("load", &Cubins::load, py::arg("choice"))
      .def_property_readonly("functions", [](Cubins& self) {
        // (entry, status_text, workspace, context)
        return py::make_tuple(
            reinterpret_cast<uintptr_t>(&qflash::run_cubins), reinterpret_cast<uintptr_t>(&qflash::cubins_text),
            reinterpret_cast<uintptr_t>(&qflash::cubins_workspace), reinterpret_cast<uintptr_t>(&self));
      });
}
