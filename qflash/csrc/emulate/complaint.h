// Error messages of a launch.
#pragma once

#include <string>

#include "emulate/fiber.h"

namespace emulate {

extern std::string complaint;  // the first error since the launch began

void complain(const std::string& what);

// Called when this thread does what a GPU forbids: the thread stops for good.
void fail(const std::string& what);

// Which threads wait for what in a block, or a cluster, that is stuck.
std::string waiting();

}  // namespace emulate
