// Which instruction set the engine runs: determined once, at load, or requested with QFLASH_CPU_ISA.
#pragma once

namespace qf {

enum class Isa { kGeneric, kAvx2, kAvx512 };

// The instruction set to run. Fails, with a text, when QFLASH_CPU_ISA requests one that is unknown or missing here.
int choose_isa(Isa* isa);

// Instructions beyond the three sets, for kernels that test them one by one. Each is false unless `isa` is kAvx512:
// requesting less by QFLASH_CPU_ISA turns them off too.
bool has_avx512_vnni();
bool has_avx512_bf16();
// AMX tiles, int8 and bfloat16, and the permission to use them, requested at the first call. QFLASH_CPU_ISA=amx
// requires them, =avx512 leaves them out.
bool has_amx();

}  // namespace qf

// The function `name` of the namespace of `isa`. Every instruction set's object library defines it.
#if defined(__x86_64__)
#define QF_PICK(isa, name)                          \
  ((isa) == ::qf::Isa::kAvx512 ? ::qf::avx512::name \
   : (isa) == ::qf::Isa::kAvx2 ? ::qf::avx2::name   \
                               : ::qf::generic::name)
// Declares `declaration` in every namespace QF_PICK may reach.
#define QF_DECLARE_PER_ISA(...) \
  namespace qf {                \
  namespace avx512 {            \
  __VA_ARGS__;                  \
  }                             \
  namespace avx2 {              \
  __VA_ARGS__;                  \
  }                             \
  namespace generic {           \
  __VA_ARGS__;                  \
  }                             \
  }
#else
#define QF_PICK(isa, name) (static_cast<void>(isa), ::qf::generic::name)
#define QF_DECLARE_PER_ISA(...) \
  namespace qf {                \
  namespace generic {           \
  __VA_ARGS__;                  \
  }                             \
  }
#endif
