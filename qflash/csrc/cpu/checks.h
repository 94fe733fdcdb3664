// Checks that keep a call from memory it must not access: above all of what only the data shows, the values of kv_lens,
// cu_seqlens and positions.
#pragma once

#include "qflash.h"
#include "sequence.h"

namespace qf {

// For k and v as two arrays or, with `pages`, as pages of a cache, too. QF_OK, or QF_BAD_VALUE / QF_UNSUPPORTED /
// QF_BAD_ABI with a text that names the argument, the value given and what is allowed.
int check_values(const QfAttnParams& p, bool pages = false);

// Parts of it that other checks share.

// cu[0] = 0, never decreasing, no step above `longest`, cu[batch] = total.
int check_cumulative(const char* name, const char* longest_name, const int32_t* cu, int32_t batch, int64_t total,
                     int64_t longest);
// A row of rope.cos; `name` and `index` identify the position in the message.
int check_position(const char* name, int64_t index, int64_t position, const QfRope& rope);
// The entries of a sequence's row of the page table for the tokens `needed`. No others are read.
int check_page_table(const QfKv& kv, int64_t batch, KeyRange needed);

}  // namespace qf
