#include "isa.h"

#include <cstdlib>
#include <cstring>

#include "status.h"

namespace qf {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512"};

bool machine_has(Isa isa) {
  if (isa == Isa::kGeneric) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (isa == Isa::kAvx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return machine_has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

Isa best_here() {
  if (machine_has(Isa::kAvx512)) return Isa::kAvx512;
  return machine_has(Isa::kAvx2) ? Isa::kAvx2 : Isa::kGeneric;
}

struct Choice {
  Isa isa;
  bool known;      // QFLASH_CPU_ISA is unset or names an instruction set
  char asked[32];  // what it says, cut to fit a message
};

Choice make_choice() {
  Choice choice{best_here(), true, ""};
  const char* asked = std::getenv("QFLASH_CPU_ISA");
  if (!asked || !*asked) return choice;
  std::strncpy(choice.asked, asked, sizeof choice.asked - 1);
  choice.known = false;
  for (int i = 0; i < 3; i++)
    if (std::strcmp(asked, kNames[i]) == 0) {
      choice.isa = Isa(i);
      choice.known = true;
    }
  return choice;
}

const Choice choice = make_choice();

}  // namespace

int choose_isa(Isa* isa) {
  static const bool usable = machine_has(choice.isa);
  if (!choice.known) return fail(QF_BAD_VALUE, "QFLASH_CPU_ISA is '%s'; allowed: generic, avx2, avx512", choice.asked);
  if (!usable)
    return fail(QF_UNSUPPORTED, "QFLASH_CPU_ISA is '%s', which this machine lacks; allowed here: %s", choice.asked,
                best_here() == Isa::kAvx2 ? "generic, avx2" : "generic");
  *isa = choice.isa;
  return QF_OK;
}

#if defined(__x86_64__)
bool has_avx512_vnni() { return choice.isa == Isa::kAvx512 && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return choice.isa == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_avx512_vnni() { return false; }
bool has_avx512_bf16() { return false; }
#endif

}  // namespace qf

extern "C" const char* qf_cpu_isa(void) { return qf::kNames[int(qf::choice.isa)]; }
