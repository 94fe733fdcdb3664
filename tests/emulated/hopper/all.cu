// The wrappers of Hopper's instructions, each in a kernel that does little else: one library, for a GPU
// (tests/compile/test_hopper.py) and for the emulator (test_emulated_hopper.py).
#include "boxes.cu"
#include "byte_products.cu"
#include "clusters.cu"
#include "products.cu"
#include "registers.cu"
#include "small.cu"
#include "stores.cu"
