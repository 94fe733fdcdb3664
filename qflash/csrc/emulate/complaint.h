// What went wrong in a launch, in words.
#pragma once

#include <string>

#include "emulate/fiber.h"

namespace emulate {

extern std::string complaint;  // the first thing that went wrong since the launch began

void complain(const std::string& what);

// This thread did what a GPU forbids: it goes no further.
void fail(const std::string& what);

// Who waits for what in a block, or a cluster, that goes no further.
std::string waiting();

}  // namespace emulate
