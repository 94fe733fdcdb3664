// Linear layers of bfloat16 without conversion, by AVX-512's products of pairs or in AMX tiles.
#include "linear_block.h"

namespace qf {
namespace QF_ISA {

extern const LinearKernel linear_bf16 = {kRowStep,
                                         kMostRows,
                                         kPanel,
                                         kMostColumns,
                                         kFewRowsAlongK,
                                         kFewColumns,
                                         block_scratch_bytes,
                                         multiply_block<BF16Pairs>};

}  // namespace QF_ISA
}  // namespace qf
