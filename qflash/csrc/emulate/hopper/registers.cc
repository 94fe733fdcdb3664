#include "emulate/hopper/registers.h"

#include <string>

#include "emulate/complaint.h"
#include "emulate/hopper/state.h"

namespace emulate {

void set_registers(int registers) {
  Warpgroup& group = own_warpgroup();
  if (registers % 8 || registers < 24 || registers > 256)
    fail("nobody has " + std::to_string(registers) + " registers");
  if (group.traded && group.registers != registers) fail("warps of a warpgroup ask for different registers");
  if (++group.traded > 128) fail("registers change hands twice");
  group.registers = registers;
}

}  // namespace emulate
