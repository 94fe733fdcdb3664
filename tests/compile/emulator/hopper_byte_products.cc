// ../hopper/byte_products.cuh on the emulator. seed: of the order that warps and lanes run in. Each returns 0, or 1
// where the emulator complains.
#include <cuda.h>  // driver/cuda.h, and with it hopper_on_host.h, which everything below needs

#include "../hopper/byte_products.cuh"

static int run(std::function<void(char*)> body, int bytes, int seed) {
  host::extension = &host::hopper;
  char* const s_bytes = reinterpret_cast<char*>(s_memory);
  return host::launch_blocks([&] { body(s_bytes); }, 1, 128, bytes, unsigned(seed));
}

#define QF_RUN(MULTIPLY, N, ROW)  \
  if (n == N && row_bytes == ROW) \
    return run([=](char* s_bytes) { MULTIPLY<N, ROW>(s_bytes, a, b, out); }, Tiles<N, ROW>::kBytes, seed);
#define QF_RUN_S8(N, ROW) QF_RUN(multiply_s8, N, ROW)
#define QF_RUN_E4M3(N, ROW) QF_RUN(multiply_e4m3, N, ROW)

extern "C" int try_s8(int n, int row_bytes, const char* a, const char* b, int32_t* out, int seed) {
  using namespace byte_products;
  QF_EACH_S8(QF_RUN_S8)
  return 1;
}
extern "C" int try_e4m3(int n, int row_bytes, const char* a, const char* b, float* out, int seed) {
  using namespace byte_products;
  QF_EACH_E4M3(QF_RUN_E4M3)
  return 1;
}
