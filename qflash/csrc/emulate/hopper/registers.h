// setmaxnreg: registers are reassigned once, and warps of a warpgroup request the same number.
#pragma once

namespace emulate {

void set_registers(int registers);

}  // namespace emulate
