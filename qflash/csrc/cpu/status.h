// How an entry fails: a status code and a text that this thread can query afterwards.
#pragma once

#include "qflash.h"

namespace qf {

// Stores the formatted text as this thread's last failure and returns `status`.
int fail(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace qf
