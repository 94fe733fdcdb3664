#include "status.h"

#include <cstdarg>
#include <cstdio>

namespace qf {
namespace {
thread_local char last_text[512] = "";
}

int fail(int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_text, sizeof last_text, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace qf

extern "C" const char* qf_cpu_status_text(int status) {
  switch (status) {
    case QF_OK:
      return "no error";
    case QF_NO_MEMORY:
      return "the CPU engine could not allocate scratch memory";
    case QF_BAD_ABI:
      return "QfAttnParams of caller and CPU engine differ in size: they were built apart";
    case QF_INTERRUPTED:
      return "the call was interrupted";
    default:
      return qf::last_text;
  }
}
