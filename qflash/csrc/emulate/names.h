// What barriers and warps of a block are called, for complaints and traces.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "emulate/types.h"

namespace emulate {

inline std::map<const void*, std::string> barrier_names;  // of this block
inline std::vector<std::string> role_names;               // of its warps

inline void begin_names(int threads) {
  barrier_names.clear();
  role_names.assign(size_t(threads + 31) / 32, "");
}

inline void name_barrier(const void* s_barrier, const char* name, int stage) {
  barrier_names[s_barrier] = std::string(name) + ", stage " + std::to_string(stage);
}
inline std::string barrier_name(const void* s_barrier) {
  const auto found = barrier_names.find(s_barrier);
  return found == barrier_names.end() ? "" : found->second;
}

inline void name_role(const char* name, int index) {
  role_names[threadIdx.x / 32] = name + (index < 0 ? "" : " " + std::to_string(index));
}

}  // namespace emulate
