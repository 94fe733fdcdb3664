// A library may be compiled in parts, in parallel: the same launch.cu with -DQF_PART=0, 1, .. (column `parts` of
// dispatch.KERNELS). Part 0 has the C entry, the others the launches of kernels that nvcc compiles slowly. Without
// QF_PART, one compilation contains everything.
#pragma once

#ifdef QF_PART
#define QF_IN_PART(part) (QF_PART == (part))
#else
#define QF_IN_PART(part) 1
#endif
