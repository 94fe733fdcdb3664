// The command line of a profiling binary.
#pragma once

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace qf {
namespace standalone {

constexpr const char* kDtypes[] = {"float32", "float16", "bfloat16"};  // by QfDtype

struct Options {
  int warmup = 2, runs = 3;
  bool random = false;  // else every value is 1, and so is every output
  int seed = 0;
  int batch = 1, heads = 16, kv_heads = 0, length = 1024, keys = 0, head_dim = QF_HEAD_DIM;  // 0: as heads, as length
  bool causal = false;
};

inline void print_help(const char* kernel) {
  std::printf(
      "profile_%s: kernel '%s', compiled for %s, head_dim up to %d, sm_%d.\n"
      "Checks it against the CPU engine (reference kept in .cache/), then times it with CUDA events.\n\n"
      "  --warmup=N     runs before the timed ones (default 2)\n"
      "  --runs=N       timed runs (default 3; 0: check only)\n"
      "  --random       values from N(0, 1) instead of ones\n"
      "  --seed=N       which random values (default 0)\n"
      "  --batch=N --heads=N --kv-heads=N --length=N --keys=N --head-dim=N\n"
      "                 the problem (default 1, 16, as heads, 1024, as length, %d)\n"
      "  --causal       query i sees keys up to i + keys - length\n"
      "  --dtype=NAME   must be %s: one binary is one specialisation (make KERNEL=%s DTYPE=... HEAD_DIM=...)\n\n"
      "Exit status: 0 agrees, 1 does not, 2 bad flag, 3 CUDA error or no GPU.\n",
      kernel, kernel, kDtypes[QF_DTYPE], QF_HEAD_DIM, QF_ARCH, QF_HEAD_DIM, kDtypes[QF_DTYPE], kernel);
}

// The text after "--name=" if `argument` is that flag, else null.
inline const char* value_of(const char* argument, const char* name) {
  const size_t length = std::strlen(name);
  return std::strncmp(argument, name, length) == 0 && argument[length] == '=' ? argument + length + 1 : nullptr;
}

inline bool parse_count(const char* name, const char* text, int least, int* result) {
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end || errno || value < least || value > INT_MAX) {
    std::fprintf(stderr, "%s is '%s'; allowed: an integer, %d or more\n", name, text, least);
    return false;
  }
  *result = int(value);
  return true;
}

// False, after printing the reason, if a flag is unknown or its value is not allowed.
inline bool parse(int count, char** arguments, Options* o) {
  const struct {
    const char* name;
    int least;
    int* place;
  } counts[] = {{"--warmup", 0, &o->warmup}, {"--runs", 0, &o->runs},   {"--seed", 0, &o->seed},
                {"--batch", 1, &o->batch},   {"--heads", 1, &o->heads}, {"--kv-heads", 1, &o->kv_heads},
                {"--length", 1, &o->length}, {"--keys", 1, &o->keys},   {"--head-dim", 1, &o->head_dim}};
  for (int i = 1; i < count; i++) {
    const char* argument = arguments[i];
    bool known = false;
    for (const auto& flag : counts)
      if (const char* text = value_of(argument, flag.name)) {
        known = true;
        if (!parse_count(flag.name, text, flag.least, flag.place)) return false;
      }
    if (known) continue;
    if (std::strcmp(argument, "--random") == 0) {
      o->random = true;
    } else if (std::strcmp(argument, "--causal") == 0) {
      o->causal = true;
    } else if (const char* text = value_of(argument, "--dtype")) {
      if (std::strcmp(text, kDtypes[QF_DTYPE]) != 0) {
        std::fprintf(stderr, "--dtype is '%s'; allowed: %s, what this binary was built for (make ... DTYPE=%s)\n", text,
                     kDtypes[QF_DTYPE], text);
        return false;
      }
    } else {
      std::fprintf(stderr, "'%s' is no flag, or lacks its =value; --help lists them\n", argument);
      return false;
    }
  }
  if (!o->kv_heads) o->kv_heads = o->heads;
  if (!o->keys) o->keys = o->length;
  if (o->heads % o->kv_heads) {
    std::fprintf(stderr, "--kv-heads is %d; allowed: a divisor of --heads, %d\n", o->kv_heads, o->heads);
    return false;
  }
  if (o->head_dim > QF_HEAD_DIM) {
    std::fprintf(stderr, "--head-dim is %d; allowed: 1 to %d, what this binary was built for (make ... HEAD_DIM=...)\n",
                 o->head_dim, QF_HEAD_DIM);
    return false;
  }
  return true;
}

}  // namespace standalone
}  // namespace qf
