// Rows between floats and 16 bits. See int8_quantized.h.
#include <string.h>

#include "int8_quantized.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {

void widen_row(float* to, const void* from, int32_t dtype, int n) { load_row(to, from, dtype, n); }

void narrow_row(void* to, const float* from, int32_t dtype, int n) { store_row(to, from, dtype, n); }

}  // namespace QF_ISA
}  // namespace qf
