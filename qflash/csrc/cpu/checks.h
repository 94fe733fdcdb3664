// What only the data can tell: values of kv_lens, cu_seqlens and positions.
#pragma once

#include "qflash.h"

namespace qf {

// QF_OK, or QF_BAD_VALUE / QF_BAD_ABI with a text that names the argument, what came and what is allowed.
int check_values(const QfAttnParams& p);

}  // namespace qf
