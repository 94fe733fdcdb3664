// The wrappers of Hopper's instructions, each in a kernel that does little else: one library for test_hopper.py.
#include "boxes.cu"
#include "byte_products.cu"
#include "products.cu"
#include "registers.cu"
#include "small.cu"
