// What stands between a call and memory it must not touch: above all what only the data can tell, the values of
// kv_lens, cu_seqlens and positions.
#pragma once

#include "qflash.h"

namespace qf {

// For two arrays in k's and v's place or, with `pages`, pages of a cache too. QF_OK, or QF_BAD_VALUE / QF_UNSUPPORTED /
// QF_BAD_ABI with a text that names the argument, what came and what is allowed.
int check_values(const QfAttnParams& p, bool pages = false);

}  // namespace qf
