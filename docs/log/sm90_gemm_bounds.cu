// What bounds the loop of sm90_gemm: the questions of sm90_gemm.md, asked of a GPU. From the top of the repository:
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Iqflash/csrc -Iqflash/csrc/include
//        docs/log/sm90_gemm_bounds.cu -o bounds && ./bounds
// Every block multiplies tiles of 128 x 256 and throws the sums away. Operands fit L2, and lie as in a large product:
// bands of eight pairs of row tiles. Rates are of all blocks together, a step is 128 bytes of k.
#include <cstdio>
#include <random>
#include <vector>

#include "common/launch.cuh"
#include "gemm/wgmma/block.cuh"
#include "hopper/tensor_map.h"
#include "kernels/linear/sm90_gemm/config.h"

using namespace qf;
using namespace qf::gemm::wgmma;

struct Ask {
  int tiles, steps;     // of each block
  int lag, end_clocks;  // steps that consumer 1 is late; what a consumer does after its last product of a tile
  int rows_in_band;     // clusters above each other
};

// kLoads: the copy engine fills the stages; else whatever lies there is multiplied, and barriers alone are the pace.
template <class Config, bool kLoads>
__global__ void __launch_bounds__(Config::kThreads, 1)
    bounds_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ Ask ask, int* const g_never) {
  using X = typename Config::X;
  using W = typename Config::W;
  alignas(1024) extern __shared__ float4 s_memory[];
  const SharedMemory<Config> s(own_shared(s_memory));
  if (threadIdx.x == 0) s.init_barriers();
  meet<Config>();
  const int cluster = int(blockIdx.x) / Config::kCluster, rank = int(blockIdx.x) % Config::kCluster;
  RingPosition<Config::kStages> at;
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<Config::kProducerRegisters>();
    const int row0 = (cluster % ask.rows_in_band * Config::kCluster + rank) * Config::kRows;
    const int column0 = cluster / ask.rows_in_band * Config::kColumns;
    for (int step = 0; threadIdx.x == 0 && step < ask.tiles * ask.steps; ++step, at.advance()) {
      Mbarrier* const full = &s.steps->full[at.stage()];
      at.wait_empty(*s.steps);
      if (!kLoads) {
        mbarrier_arrive(full);
        continue;
      }
      const int k = step % ask.steps * Config::kStep;
      mbarrier_arrive_expect(full, Config::kStageBytes);
      load_box<X, 1>(s.x + at.stage() * X::Tile::kBytes, maps.x, row0, k, full);
      for (int own = 0; own < Config::kOwnWBoxes; ++own) {
        const int i = rank * Config::kOwnWBoxes + own;
        load_box<W, Config::kCluster>(s.w + at.stage() * W::Tile::kBytes + i * W::kBoxBytes, maps.w,
                                      column0 + i * W::kBoxLines, k, full);
      }
    }
  } else {
    take_registers<Config::kConsumerRegisters>();
    const int index = warp_uniform(int(threadIdx.x) / kWarpgroupThreads - 1), lane = int(threadIdx.x) % 32;
    const typename X::Tiles x_tiles(s.x + index * X::kWarpgroupBytes);
    const typename W::Tiles w_tiles(s.w);
    typename Config::Sum sums[Config::kSumTiles][4];
    const auto release = [&](int stage) {
      if (lane < Config::kCluster) mbarrier_arrive_at(&s.steps->empty[stage], uint32_t(lane));
    };
    if (ask.lag > 0 && index == 1) barrier_sync<1, 2 * kWarpgroupThreads>();
    for (int tile = 0; tile < ask.tiles; ++tile) {
      hold(sums);
      wgmma_fence();
#pragma unroll 1
      for (int step = 0; step < ask.steps; ++step, at.advance()) {
        typename X::Tiles x = x_tiles.later(at.stage());
        typename W::Tiles w = w_tiles.later(at.stage());
        x.low = warp_uniform(x.low), w.low = warp_uniform(w.low);
        at.wait_full(*s.steps);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Config::kProducts; ++i)
          Config::Product::template multiply<false, false>(sums, x.step(i), w.step(i), step > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0) release(at.previous().stage());
        if (ask.lag > 0 && index == 0 && tile == 0 && step + 1 == ask.lag) barrier_arrive<1, 2 * kWarpgroupThreads>();
      }
      wgmma_wait<0>();
      hold(sums);
      release(at.previous().stage());
      for (const long long begin = clock64(); clock64() - begin < ask.end_clocks;) {
      }
      if (sums[0][0] == 123457 && sums[1][1] == 765431) *g_never = 1;  // the sums are wanted
    }
  }
  meet<Config>();
}

template <class Element>
int element_of(std::mt19937& random, const char* fill);
template <>
int element_of<int8_t>(std::mt19937& random, const char* fill) {
  std::normal_distribution<float> normal(0.0f, 30.0f);
  if (fill[0] == 'z') return 0;
  if (fill[0] == 'u') return int(random() % 256) - 128;
  const float x = normal(random);
  return int(x < -127 ? -127 : x > 127 ? 127 : x);
}
template <>
int element_of<BF16>(std::mt19937& random, const char* fill) {
  std::normal_distribution<float> normal;
  if (fill[0] == 'z') return 0;
  if (fill[0] == 'u') return int(0x3f00 + random() % 256);  // around 1, any mantissa
  const float x = normal(random);
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return int(bits >> 16);
}

#define CHECK(call)                                                            \
  do {                                                                         \
    if (const int status = int(call)) {                                        \
      std::printf("%s: %s\n", #call, cudaGetErrorString(cudaError_t(status))); \
      std::exit(1);                                                            \
    }                                                                          \
  } while (0)

template <class Shape, bool kLoads>
void run(const char* name, int lag, int end_clocks, const char* fill, int steps = 64) {
  using Config = TileConfig<Shape>;
  using Element = typename Config::Element;
  int processors = 0;
  CHECK(multiprocessors(processors));
  const int clusters = processors / Config::kCluster, rows_in_band = 16 / Config::kCluster;
  const int64_t rows = 16 * Config::kRows, columns = (clusters + rows_in_band - 1) / rows_in_band * Config::kColumns;
  const int64_t k = steps * Config::kStep, bytes = (rows + columns) * k * int(sizeof(Element));
  std::vector<Element> values(size_t((rows + columns) * k));
  std::mt19937 random(1);
  for (Element& x : values) {
    const int bits = element_of<Element>(random, fill);
    memcpy(&x, &bits, sizeof x);
  }
  Element* memory;
  int* never;
  CHECK(cudaMalloc(&memory, size_t(bytes)));
  CHECK(cudaMalloc(&never, sizeof(int)));
  CHECK(cudaMemcpy(memory, values.data(), size_t(bytes), cudaMemcpyHostToDevice));
  TensorMaps maps{};
  using X = typename Config::X;
  using W = typename Config::W;
  CHECK(encode_tensor_map<typename X::Tile>(maps.x, {memory, {k, rows, 1, 1}, {k, 0, 0}}, X::kBoxRows));
  CHECK(encode_tensor_map<typename W::Tile>(maps.w, {memory + rows * k, {k, columns, 1, 1}, {k, 0, 0}}, W::kBoxRows));
  const Ask ask = {40, steps, lag, end_clocks, rows_in_band};
  const Launch how = {
      clusters * Config::kCluster, Config::kThreads, Config::kSharedBytes, nullptr, false, Config::kCluster};
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int i = 0; i < 20; ++i) CHECK(launch(how, bounds_kernel<Config, kLoads>, maps, ask, never));  // clocks settle
  CHECK(cudaEventRecord(begin));
  constexpr int kTimes = 20;
  for (int i = 0; i < kTimes; ++i) CHECK(launch(how, bounds_kernel<Config, kLoads>, maps, ask, never));
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  float milliseconds = 0;
  CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
  const double products = 2.0 * double(how.blocks) * Config::kRows * Config::kColumns * double(k) * ask.tiles * kTimes;
  std::printf("%-34s  lag %d  end %4d clk  %-8s  %7.1f T/s  %6.1f ns a step\n", name, lag, end_clocks, fill,
              products / (milliseconds * 1e9), milliseconds * 1e6 / (double(kTimes) * ask.tiles * steps));
  CHECK(cudaFree(memory));
  CHECK(cudaFree(never));
}

template <class Problem>
void ask_all(const char* type) {
  using Alone = sm90_gemm::Large<Problem, 1>;
  using Pair = sm90_gemm::Large<Problem, 2>;
  std::printf("\n%s\n", type);
  run<Alone, false>("(a) products alone", 0, 0, "normal");
  run<Alone, true>("(a) with loads", 0, 0, "normal");
  run<Pair, false>("(b) products, barriers of pairs", 0, 0, "normal");
  run<Pair, true>("(b) with loads, multicast", 0, 0, "normal");
  for (const int end_clocks : {1000, 2000})
    for (const int lag : {0, 1, 2, 3})
      for (const int steps : {16, 64})
        run<Pair, true>(steps == 16 ? "(c) 16 steps" : "(c) 64 steps", lag, end_clocks, "normal", steps);
  for (const char* fill : {"zeros", "normal", "uniform"}) run<Pair, true>("(d) fill", 2, 0, fill);
}

int main() {
  ask_all<sm90_gemm::Problem<true, QF_I32, QF_IDENTITY, false, false>>("int8");
  ask_all<sm90_gemm::Problem<false, QF_BF16, QF_IDENTITY, false, false>>("bfloat16");
}
