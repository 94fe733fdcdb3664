// The check of a profiling binary without its kernel: the CPU engine plays both parts, so no GPU is needed.
//   check         the engine's own result, rounded to the kernel's type, agrees
//   check damage  the same with one value in a hundred off by 2 %
//   check lost    the same with one output left unwritten (NaN)
#include "standalone/reference.h"

int main(int count, char** arguments) {
  using namespace qf::standalone;
  Options o;
  o.random = true;
  o.batch = 2, o.heads = 4, o.kv_heads = 2, o.length = 33, o.keys = 47, o.head_dim = 24, o.causal = true;
  const Inputs in = make_inputs(o);
  Reference r;
  if (get_reference(o, in, &r)) return 3;
  std::vector<Element> out;
  for (const float x : r.out) out.push_back(narrow(x));
  const bool damage = count > 1 && std::strcmp(arguments[1], "damage") == 0;
  for (size_t i = 0; damage && i < out.size(); i += 100) out[i] = narrow(1.02f * widen(out[i]));
  if (count > 1 && std::strcmp(arguments[1], "lost") == 0) out[7] = narrow(NAN);
  return agrees(o, QF_NATIVE, in, r, out, r.lse) ? 0 : 1;
}
