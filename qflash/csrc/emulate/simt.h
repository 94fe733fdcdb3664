// The prelude of emulated sources: g++ reads it before a kernel's launch.cu, as nvcc reads its own headers. README.md
// lists what is modelled and what is not.
#pragma once

#define QF_EMULATOR
#undef _FORTIFY_SOURCE  // it forbids longjmp to another stack, by which fibers switch

#include "emulate/types.h"
// CUDA's keywords come first, because everything below is read as device code, too.
#include "emulate/complaint.h"
#include "emulate/cp_async.h"
#include "emulate/floats.h"
#include "emulate/hopper.h"
#include "emulate/intrinsics.h"
#include "emulate/matrix.h"
#include "emulate/named_barrier.h"
#include "emulate/names.h"
#include "emulate/trace.h"
#include "emulate/wmma.h"
// The runtime comes last: a launch consists of blocks that the scheduler runs.
#include "emulate/control.h"
#include "emulate/runtime/cuda_runtime.h"
