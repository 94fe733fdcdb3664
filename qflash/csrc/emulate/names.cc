#include "emulate/names.h"

#include <map>

#include "emulate/fiber.h"

namespace emulate {

static std::map<const void*, std::string> barrier_names;  // of this block
std::vector<std::string> role_names;

void begin_names(int threads) {
  barrier_names.clear();
  role_names.assign(size_t(threads + 31) / 32, "");
}

void name_barrier(const void* s_barrier, const char* name, int stage) {
  barrier_names[s_barrier] = std::string(name) + ", stage " + std::to_string(stage);
}
std::string barrier_name(const void* s_barrier) {
  const auto found = barrier_names.find(s_barrier);
  return found == barrier_names.end() ? "" : found->second;
}

void name_role(const char* name, int index) {
  role_names[size_t(fiber_now) / 32] = name + (index < 0 ? "" : " " + std::to_string(index));
}

}  // namespace emulate
