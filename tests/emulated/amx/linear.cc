// The linear layers of bfloat16 in AMX tiles for test_emulated_amx.py, which puts tiles.h in front of this: there tile
// instructions are software.
#include "linear_bf16.cc"

namespace qf {

bool interrupted() { return false; }

}  // namespace qf

// A block of out. scratch: as many bytes as try_scratch_bytes says, at 64 of them.
extern "C" int try_block(const QfLinearParams* p, const void* second_x, int64_t row, int64_t column, int rows,
                         int columns, void* scratch) {
  return qf::QF_ISA::linear_bf16.multiply({*p, second_x}, {row, column, rows, columns}, scratch);
}

extern "C" int64_t try_scratch_bytes(int rows, int columns, int products) {
  return qf::QF_ISA::linear_bf16.scratch_bytes(rows, columns, products);
}
