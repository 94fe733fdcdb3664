// precision="int8" served in float: right within the contract, without its speed.
#include "qflash.h"

extern "C" int qf_cpu_int8(const QfAttnParams* p, void* stream) { return qf_cpu(p, stream); }
