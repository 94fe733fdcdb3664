// The INT8 kernel of one instruction set: compiled once for each, into namespace qf::QF_ISA. See int8.h.
#include "int8.h"

#if defined(__AMX_INT8__)
#include "int8_tiles_amx.h"
#else
#include "int8_tiles_simd.h"
#endif

#include "int8_attend.h"

namespace qf {
namespace QF_ISA {

extern const Int8Kernel int8_kernel = {
    kRowBlock, panel_bytes, value_bytes, value_width, sum_keys, pack_block, attend, merge,
};

}  // namespace QF_ISA
}  // namespace qf
