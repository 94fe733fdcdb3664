#include "emulate/control.h"

#include <string>

#include "emulate/complaint.h"
#include "emulate/trace.h"

int qf_emulate_schedule(int seed, int multiprocessors) {
  emulate::complaint.clear();
  if (multiprocessors < 1 || multiprocessors > emulate::kDevices) return 1;
  emulate::seed = unsigned(seed);
  emulate::device = multiprocessors - 1;
  return 0;
}

const char* qf_emulate_complaint() { return emulate::complaint.c_str(); }

void qf_emulate_trace(int on) {
  emulate::timed = on != 0;
  emulate::spans.clear();
  emulate::launches = 0;
  emulate::launch_begin = emulate::last_end = 0;
}

const char* qf_emulate_spans() {
  static std::string text;
  text.clear();
  for (const emulate::Span& span : emulate::spans) {
    text += span.kind;
    for (uint64_t number : {uint64_t(span.launch), uint64_t(span.block), uint64_t(span.warp), span.begin, span.end})
      text += '\t' + std::to_string(number);
    text += '\t' + span.name + '\n';
  }
  return text.c_str();
}
