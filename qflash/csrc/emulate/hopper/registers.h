// setmaxnreg: registers change hands once, and warps of a warpgroup ask for the same.
#pragma once

namespace emulate {

void set_registers(int registers);

}  // namespace emulate
