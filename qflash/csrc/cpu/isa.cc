#include "isa.h"

#include <cstdlib>
#include <cstring>

#include "status.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qf {
namespace {

// Values of QFLASH_CPU_ISA. "amx" is avx512 for every kernel without AMX code of its own.
constexpr const char* kNames[] = {"generic", "avx2", "avx512", "amx"};
constexpr Isa kSets[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512};
constexpr int kAmx = 3;

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

// AMX tiles with int8 and bfloat16 products, and the AVX-512 that goes with them.
bool machine_has_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;  // CPUID.7.0:EDX
  constexpr unsigned kXsaveByOs = 1u << 27;                                 // CPUID.1:ECX
  constexpr unsigned kTileState = 3u << 17;                                 // XCR0
  unsigned a, b, c, d;
  if (!machine_has(Isa::kAvx512) || !__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bf16"))
    return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTile | kInt8)) != (kBf16 | kTile | kInt8))
    return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kXsaveByOs)) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
#else
  return false;
#endif
}

// The system's permission to use tiles. Linux grants it to a process on request, because tiles make every signal frame
// 8 KiB larger and small alternative signal stacks are rejected from then on: so it is not requested before tiles are
// needed.
bool tiles_permitted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}

bool machine_runs(int name) { return name == kAmx ? machine_has_tiles() : machine_has(kSets[name]); }

int best_here() {
  int name = kAmx;
  while (!machine_runs(name)) name--;
  return name;
}

struct Choice {
  int name;
  bool known;      // QFLASH_CPU_ISA is unset or names an instruction set
  char asked[32];  // its value, cut to fit a message
};

Choice make_choice() {
  const char* asked = std::getenv("QFLASH_CPU_ISA");
  if (!asked || !*asked) return {best_here(), true, ""};
  Choice choice{0, false, ""};
  std::strncpy(choice.asked, asked, sizeof choice.asked - 1);
  for (int name = 0; name <= kAmx; name++)
    if (std::strcmp(asked, kNames[name]) == 0) {
      choice.name = name;
      choice.known = true;
    }
  return choice;
}

const Choice choice = make_choice();
const bool usable = machine_runs(choice.name);

}  // namespace

int choose_isa(Isa* isa) {
  if (!choice.known)
    return fail(QF_BAD_VALUE, "QFLASH_CPU_ISA is '%s'; allowed: generic, avx2, avx512, amx", choice.asked);
  if (!usable)
    return fail(QF_UNSUPPORTED, "QFLASH_CPU_ISA is '%s', which this machine lacks; the most it runs is %s",
                choice.asked, kNames[best_here()]);
  if (choice.name == kAmx && *choice.asked && !tiles_permitted())
    return fail(QF_UNSUPPORTED, "QFLASH_CPU_ISA is 'amx', but the system does not permit AMX tiles in this process");
  *isa = kSets[choice.name];
  return QF_OK;
}

bool has_amx() { return usable && choice.name == kAmx && tiles_permitted(); }
#if defined(__x86_64__)
bool has_avx512_vnni() { return kSets[choice.name] == Isa::kAvx512 && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return kSets[choice.name] == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_avx512_vnni() { return false; }
bool has_avx512_bf16() { return false; }
#endif

}  // namespace qf

extern "C" const char* qf_cpu_isa(void) {
  const int name = qf::choice.name;
  return qf::kNames[name == qf::kAmx && !qf::has_amx() ? name - 1 : name];
}
