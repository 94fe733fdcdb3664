// The names of a block's barriers and warps, for complaints and traces.
#pragma once

#include <string>
#include <vector>

namespace emulate {

extern std::vector<std::string> role_names;  // of this block's warps

void begin_names(int threads);

void name_barrier(const void* s_barrier, const char* name, int stage);
std::string barrier_name(const void* s_barrier);

void name_role(const char* name, int index);

}  // namespace emulate
