// ../hopper/small.cuh on the emulator. seed: of the order that warps and lanes run in. Each returns 0, or 1 where the
// emulator complains.
#include <cuda.h>  // driver/cuda.h, and with it hopper_on_host.h, which everything below needs

#include "../hopper/small.cuh"

namespace {

int run(std::function<void(char*)> body, int threads, int seed) {
  host::extension = &host::hopper;
  char* const s_rows = reinterpret_cast<char*>(s_memory);
  return host::launch_blocks([&] { body(s_rows); }, 1, threads, small::kSharedBytes, unsigned(seed));
}

}  // namespace

extern "C" int try_matrices(const uint32_t* words, const int32_t* rows, char* out, int seed) {
  return run([=](char* s_rows) { small::store_matrices(s_rows, words, rows, out); }, 32, seed);
}
extern "C" int try_zeros(int dtype, int count, const uint32_t* x, const uint32_t* sums, uint32_t* out, int seed) {
  return run([=](char*) { small::add_zeros(dtype, count, x, sums, out); }, 32, seed);
}
extern "C" int try_pairs(int count, const uint32_t* x, const uint32_t* y, uint32_t* out, int seed) {
  return run([=](char*) { small::add_pairs(count, x, y, out); }, 32, seed);
}
extern "C" int try_codes(int count, const float* x, uint32_t* codes, int seed) {
  return run([=](char*) { small::encode(count, x, codes); }, 32, seed);
}
extern "C" int try_decoded(int count, const uint32_t* codes, uint32_t* out, int seed) {
  return run([=](char*) { small::decode(count, codes, out); }, 32, seed);
}
extern "C" int try_answers(int count, int32_t* answers, int seed) {
  return run([=](char* s_barrier) { small::ask(s_barrier, count, answers); }, 32, seed);
}
extern "C" int try_numbers(int rounds, int32_t* found, int seed) {
  return run([=](char* s_rows) { small::hand_over(s_rows, rounds, found); }, 64, seed);
}
