// The INT8 building blocks of this object's instruction set.
#pragma once

#if defined(__AVX512F__)
#include "int8_dots_avx512.h"
#elif defined(__AVX2__)
#include "int8_dots_avx2.h"
#else
#include "int8_dots_generic.h"
#endif
