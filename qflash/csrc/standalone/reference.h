// The CPU engine's result for a problem, kept in .cache/ between runs, and the comparison of a kernel's result with it.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <string>

#include "standalone/values.h"

namespace qf {
namespace standalone {

struct Reference {
  std::vector<float> out, lse;
};

// Everything the values depend on. "1" is the version of the generator and of the file.
inline std::string reference_path(const Options& o) {
  char name[256];
  std::snprintf(name, sizeof name, ".cache/reference-1-%s-b%d-h%d-%d-t%d-%d-d%d%s-%s%d.bin", kDtypes[QF_DTYPE], o.batch,
                o.heads, o.kv_heads, o.length, o.keys, o.head_dim, o.causal ? "-causal" : "",
                o.random ? "seed" : "ones", o.random ? o.seed : 0);
  return name;
}

inline uint64_t checksum(const Reference& r) {
  uint64_t sum = 0;
  for (const std::vector<float>* part : {&r.out, &r.lse})
    for (const float x : *part) {
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      sum = mix(sum ^ bits);
    }
  return sum;
}

// True if the file is complete: a run that was interrupted while writing leaves an incomplete one.
inline bool read_reference(const std::string& path, Reference* r) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (!file) return false;
  uint64_t sum = 0;
  const bool complete = std::fread(&sum, sizeof sum, 1, file) == 1 &&
                        std::fread(r->out.data(), 4, r->out.size(), file) == r->out.size() &&
                        std::fread(r->lse.data(), 4, r->lse.size(), file) == r->lse.size();
  std::fclose(file);
  return complete && sum == checksum(*r);
}

// A cache that cannot be written only costs time.
inline void write_reference(const std::string& path, const Reference& r) {
  mkdir(".cache", 0777);
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (!file) return;
  const uint64_t sum = checksum(r);
  std::fwrite(&sum, sizeof sum, 1, file);
  std::fwrite(r.out.data(), 4, r.out.size(), file);
  std::fwrite(r.lse.data(), 4, r.lse.size(), file);
  std::fclose(file);
}

// The engine computes in float32 on the kernel's inputs, which are already rounded to its type.
inline int compute_reference(const Options& o, const Inputs& in, Reference* r) {
  std::vector<float> wide[3];
  const std::vector<Element>* narrow_arrays[] = {&in.q, &in.k, &in.v};
  for (int i = 0; i < 3; i++)
    for (const Element x : *narrow_arrays[i]) wide[i].push_back(widen(x));
  const QfAttnParams p =
      make_params(o, QF_F32, QF_NATIVE, wide[0].data(), wide[1].data(), wide[2].data(), r->out.data(), r->lse.data());
  return qf_cpu(&p, nullptr);
}

inline int get_reference(const Options& o, const Inputs& in, Reference* r) {
  r->out.resize(q_count(o));
  r->lse.resize(lse_count(o));
  const std::string path = reference_path(o);
  if (read_reference(path, r)) {
    std::printf("reference: %s\n", path.c_str());
    return QF_OK;
  }
  std::printf("reference: computing on the CPU\n");
  std::fflush(stdout);
  if (const int status = compute_reference(o, in, r)) return status;
  write_reference(path, *r);
  return QF_OK;
}

// |got - wanted| / |wanted| over the whole array; NaN if an element is.
template <class Got>
double relative_l2(const std::vector<float>& wanted, Got got) {
  double error = 0, size = 0;
  for (size_t i = 0; i < wanted.size(); i++) {
    const double difference = double(got(i)) - wanted[i];
    error += difference * difference;
    size += double(wanted[i]) * wanted[i];
  }
  return size > 0 ? std::sqrt(error / size) : std::sqrt(error);
}

// The contract of docs/numerics.md for N(0, 1) inputs. Ones round to themselves, which would leave a bound of zero.
inline double out_bound(const Options& o, int precision, const Reference& r) {
  if (precision != QF_NATIVE) return 2e-2;
  if (QF_DTYPE == QF_F32) return 2e-6;
  return o.random ? 2 * relative_l2(r.out, [&](size_t i) { return widen(narrow(r.out[i])); }) : kUnit;
}

// By how much quantization may change a score: 8e-3 of |scale| (max|q| sum|k| + max|k| sum|q|), of the largest row.
inline double int8_lse_slack(const Options& o, const Inputs& in) {
  double most[2] = {0, 0}, most_sum[2] = {0, 0};
  const std::vector<Element>* arrays[] = {&in.q, &in.k};
  for (int which = 0; which < 2; which++)
    for (size_t row = 0; row < arrays[which]->size(); row += o.head_dim) {
      double sum = 0;
      for (int d = 0; d < o.head_dim; d++) {
        const double x = std::fabs(widen((*arrays[which])[row + d]));
        sum += x;
        most[which] = std::max(most[which], x);
      }
      most_sum[which] = std::max(most_sum[which], sum);
    }
  return 8e-3 / std::sqrt(double(o.head_dim)) * (most[0] * most_sum[1] + most[1] * most_sum[0]);
}

// Prints the figures; true if out and lse are within the contract.
inline bool agrees(const Options& o, int precision, const Inputs& in, const Reference& r,
                   const std::vector<Element>& out, const std::vector<float>& lse) {
  const double error = relative_l2(r.out, [&](size_t i) { return widen(out[i]); });
  const double bound = out_bound(o, precision, r);
  const double slack = precision == QF_NATIVE ? 0 : int8_lse_slack(o, in);
  double worst = 0;  // lse error over its bound; a NaN must not get lost in a maximum
  for (size_t i = 0; i < lse.size(); i++) {
    const double wanted = r.lse[i], allowed = 4e-6 * (1 + std::fabs(wanted)) + slack;
    const double here = lse[i] == r.lse[i] ? 0 : std::fabs(lse[i] - wanted) / allowed;  // -inf: a row without keys
    if (!(here <= worst)) worst = here;
    if (std::isnan(here)) break;
  }
  const bool good = error <= bound && worst <= 1;
  std::printf("%s: relative L2 error %.2e, allowed %.2e; lse at %.2f of what is allowed\n",
              good ? "agrees with the CPU engine" : "MISMATCH against the CPU engine", error, bound, worst);
  return good;
}

}  // namespace standalone
}  // namespace qf
