// What stands between a call and memory it must not touch: above all what only the data can tell, the values of
// kv_lens, cu_seqlens and positions.
#pragma once

#include "qflash.h"
#include "sequence.h"

namespace qf {

// For two arrays in k's and v's place or, with `pages`, pages of a cache too. QF_OK, or QF_BAD_VALUE / QF_UNSUPPORTED /
// QF_BAD_ABI with a text that names the argument, what came and what is allowed.
int check_values(const QfAttnParams& p, bool pages = false);

// Its parts that others share.

// cu[0] = 0, never falling, no step above `longest`, cu[batch] = total.
int check_cumulative(const char* name, const char* longest_name, const int32_t* cu, int32_t batch, int64_t total,
                     int64_t longest);
// A row of rope.cos; `name` and `index` say whose.
int check_position(const char* name, int64_t index, int64_t position, const QfRope& rope);
// The entries of a sequence's row of the page table that tokens `needed` have. No other is looked at.
int check_page_table(const QfKv& kv, int64_t batch, KeyRange needed);

}  // namespace qf
