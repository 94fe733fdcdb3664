// Linear layers of bfloat16 as they are, on AVX-512 with its BF16 products.
#include "linear_block.h"

namespace qf {
namespace QF_ISA {

extern const LinearKernel linear_bf16 = {kMaxRows,
                                         kMostRows,
                                         kPanel,
                                         kMostColumns,
                                         kFewRowsAlongK,
                                         kFewColumns,
                                         block_scratch_bytes,
                                         multiply_block<BF16Pairs>};

}  // namespace QF_ISA
}  // namespace qf
