// What this machine can do at this very moment: fp32 multiply-adds a second and streamed bytes a second.
// One text per instruction set, chosen by the caller; plain C functions for ctypes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

constexpr int kIterations = 2000;      // one chunk of multiply-adds: 10 to 50 us
constexpr size_t kSlice = 256 * 1024;  // one chunk of reading, bytes

struct Isa {
  const char* name;
  int floats_per_iteration;  // chains x lanes
  float (*multiply_add)(float);
  uint64_t (*read)(const char*, const char*);
  bool (*runs_here)();
};

// Independent accumulators: at least latency x ports of any chip, few enough for its registers. Named one by one, since
// compilers keep an array of them in memory; started apart, since equal ones would be merged.
#define TWELVE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define TWENTY_FOUR(DO) TWELVE(DO) DO(12) DO(13) DO(14) DO(15) DO(16) DO(17) DO(18) DO(19) DO(20) DO(21) DO(22) DO(23)
#define START(i) Floats a##i = Floats{} + seed * i;
#define STEP(i) a##i = a##i * x + y;  // one instruction where the target has it (-ffp-contract=fast)
#define ADD(i) sum += a##i;
#define COUNT(i) +1

#define DEFINE_ISA(NAME, TARGET, BYTES, CHAINS)                    \
  namespace NAME {                                                 \
  typedef float Floats __attribute__((vector_size(BYTES)));        \
  typedef uint64_t Words __attribute__((vector_size(BYTES)));      \
  constexpr int kFloats = (CHAINS(COUNT)) * BYTES / 4;             \
  TARGET float multiply_add(float seed) {                          \
    Floats x = Floats{} + 0.999f, y = Floats{} + 0.001f, sum = {}; \
    CHAINS(START)                                                  \
    for (int n = 0; n < kIterations; ++n) {                        \
      CHAINS(STEP)                                                 \
    }                                                              \
    CHAINS(ADD)                                                    \
    return sum[0];                                                 \
  }                                                                \
  TARGET uint64_t read(const char* p, const char* end) {           \
    Words a = {}, b = {}, c = {}, d = {};                          \
    for (; p < end; p += 4 * BYTES) {                              \
      const Words* w = reinterpret_cast<const Words*>(p);          \
      a ^= w[0];                                                   \
      b ^= w[1];                                                   \
      c ^= w[2];                                                   \
      d ^= w[3];                                                   \
    }                                                              \
    a ^= b ^ c ^ d;                                                \
    return a[0];                                                   \
  }                                                                \
  }

#if defined(__x86_64__)
DEFINE_ISA(avx512, __attribute__((target("avx512f"))), 64, TWENTY_FOUR)
DEFINE_ISA(avx2, __attribute__((target("avx2,fma"))), 32, TWELVE)
DEFINE_ISA(generic, , 16, TWELVE)
#elif defined(__aarch64__)
DEFINE_ISA(neon, , 16, TWENTY_FOUR)
#else
DEFINE_ISA(generic, , 16, TWELVE)
#endif

bool always() { return true; }

const Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512", avx512::kFloats, avx512::multiply_add, avx512::read,
     [] { return bool(__builtin_cpu_supports("avx512f")); }},
    {"avx2", avx2::kFloats, avx2::multiply_add, avx2::read,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
#if defined(__aarch64__)
    {"neon", neon::kFloats, neon::multiply_add, neon::read, always},
#else
    {"generic", generic::kFloats, generic::multiply_add, generic::read, always},
#endif
};

const Isa* find(const char* name) {
  for (const Isa& isa : kIsas)
    if (isa.runs_here() && (!*name || !strcmp(name, isa.name))) return &isa;
  return nullptr;
}

// Runs work(thread) on every thread at once; the time from the first start to the last end, in seconds.
template <typename Work>
double together(int threads, Work work) {
  std::vector<Clock::time_point> begin(threads), end(threads);
  std::atomic<int> waiting{threads};
  auto one = [&](int i) {
    --waiting;
    while (waiting) std::this_thread::yield();
    begin[i] = Clock::now();
    work(i);
    end[i] = Clock::now();
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(one, i);
  one(0);
  for (auto& t : others) t.join();
  return seconds(*std::max_element(end.begin(), end.end()) - *std::min_element(begin.begin(), begin.end()));
}

}  // namespace

extern "C" {

// Name of the instruction set `rank` places from the best that runs here; null past the last.
const char* peaks_isa(int rank) {
  for (const Isa& isa : kIsas)
    if (isa.runs_here() && rank-- == 0) return isa.name;
  return nullptr;
}

// fp32 multiply-add GFLOP/s of `threads` threads over about `ms` milliseconds; -1 for an unknown instruction set.
double peaks_fma(const char* name, int threads, double ms) {
  const Isa* isa = find(name);
  if (!isa) return -1;
  std::vector<long> chunks(threads);
  double took = together(threads, [&](int i) {
    volatile float sink = 1e-3f;
    auto until = Clock::now() + std::chrono::duration<double, std::milli>(ms);
    do {
      sink = isa->multiply_add(sink);
      ++chunks[i];
    } while (Clock::now() < until);
  });
  long total = 0;
  for (long n : chunks) total += n;
  return 2e-9 * total * isa->floats_per_iteration * kIterations / took;
}

// A buffer from malloc, as MLX's are: pages of the same size, whatever the environment makes that. Null
// when there is no memory.
void* peaks_buffer(size_t bytes) {
  void* p = malloc(bytes);
  if (p) memset(p, 1, bytes);
  return p;
}

void peaks_free(void* buffer) { free(buffer); }

// GB/s of one pass over the buffer, each of `threads` threads reading its own part; the best of `passes`.
double peaks_read(const char* name, const void* buffer, size_t bytes, int threads, int passes) {
  const Isa* isa = find(name);
  if (!isa) return -1;
  const char* start = static_cast<const char*>(buffer);
  size_t part = bytes / threads / 256 * 256;
  double best = 1e9;
  for (int pass = 0; pass < passes; ++pass) {
    std::atomic<uint64_t> sink{0};
    best = std::min(best, together(threads, [&](int i) {
                      const char* p = start + i * part;
                      for (const char* end = p + part; p < end; p += kSlice)
                        sink ^= isa->read(p, std::min(p + kSlice, end));
                    }));
  }
  return 1e-9 * part * threads / best;
}
}
