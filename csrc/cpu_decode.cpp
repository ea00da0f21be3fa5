// Choice of instruction set, and one call from start to end.
#include "cpu_decode.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(MLA_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>

#include "pool.h"
#include "schedule.h"

namespace mla {
namespace amx {
extern const Kernel kernel;
}
namespace avx512 {
extern const Kernel kernel;
}
namespace avx2 {
extern const Kernel kernel;
}
namespace neon {
extern const Kernel kernel;
}
namespace generic {
extern const Kernel kernel;
}

namespace {

#if defined(MLA_AMX)
// The CPU has tiles for bf16, the system saves them, and lets this process use them: it must be asked once, and says no
// where a thread's signal stack could not hold them.
bool amx_here() {
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // XGETBV exists
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3 << 17, kAskPermission = 0x1023, kTileData = 18;
  return (low & kTileState) == kTileState && syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}
#endif

// Best first.
std::vector<const Kernel*> kernels_here() {
  std::vector<const Kernel*> found;
#if defined(MLA_AMX_EMULATED)
  found.push_back(&amx::kernel);
#endif
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // these have F16C too
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#if defined(MLA_AMX)
  if (avx512 && amx_here()) found.push_back(&amx::kernel);
#endif
  if (avx512) found.push_back(&avx512::kernel);
  if (avx2) found.push_back(&avx2::kernel);
#elif defined(__aarch64__)
  found.push_back(&neon::kernel);
#endif
  found.push_back(&generic::kernel);
  return found;
}

const std::vector<const Kernel*>& kernels() {
  static const auto* found = new std::vector<const Kernel*>(kernels_here());
  return *found;
}

int usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// Grows, and is kept for the next call.
class Buffer {
 public:
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      const size_t wanted = (bytes + 4095) / 4096 * 4096;
      data_.reset(std::aligned_alloc(4096, wanted));
      if (!data_) throw std::bad_alloc();
      size_ = wanted;
    }
    return data_.get();
  }
  void* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

// Calls take turns: one call uses all threads, and MLX may evaluate several streams at once.
struct Engine {
  std::mutex turn;
  Pool pool;
  std::vector<Buffer> scratch;  // one a thread
  Buffer partials;
  std::mutex record_lock;
  Record record;
};

std::atomic<const Kernel*> chosen{nullptr};
std::atomic<int> thread_count{0};
std::atomic<Engine*> shared_engine{nullptr};

// Never destroyed (calls may run while the process ends), and forgotten in a forked child, where its threads don't
// exist and its locks may be held by nobody.
Engine& engine() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { shared_engine = nullptr; });
  (void)registered;
  Engine* now = shared_engine.load(std::memory_order_acquire);
  if (!now) {
    auto* fresh = new Engine;
    if (shared_engine.compare_exchange_strong(now, fresh, std::memory_order_acq_rel)) {
      now = fresh;
    } else {
      delete fresh;
    }
  }
  return *now;
}

const Kernel& current() {
  const Kernel* kernel = chosen.load(std::memory_order_relaxed);
  return kernel ? *kernel : *kernels().front();
}

const Kernel& kernel_for(const Problem& a) {
  const Kernel* kernel = &current();
  if (chosen.load(std::memory_order_relaxed) || a.dtype != Dtype::bf16 || a.rows() >= kernel->least_rows)
    return *kernel;
  return *kernels()[1];
}

// The front door has seen the tables' shapes only: their contents exist when the call runs.
void check_blocks(const Problem& a) {
  const Cache& c = a.cache;
  if (!c.table) return;
  for (int b = 0; b < a.batch; ++b) {
    const int pages = (a.lengths[b] + c.block_size - 1) / c.block_size;
    for (int i = 0; i < pages; ++i) {
      const int block = c.table[b * c.table_row + i * c.table_column];
      if (block < 0 || block >= c.blocks)
        throw std::runtime_error("[mla_decode] expected block_tables entries in [0, " + std::to_string(c.blocks) +
                                 "); got " + std::to_string(block) + " for page " + std::to_string(i) +
                                 " of sequence " + std::to_string(b));
    }
  }
}

void run_schedule(const Problem& a, const Schedule& s, const Kernel& kernel, int threads, Engine& e) {
  const size_t bytes = kernel.scratch_bytes(a, s.tile);
  if (e.scratch.size() < size_t(threads)) e.scratch.resize(threads);
  for (int i = 0; i < threads; ++i) e.scratch[i].reserve(bytes);
  e.pool.run(int(s.tasks.size()), threads,
             [&](int i, int worker) { kernel.run(a, s.tasks[i], e.scratch[worker].get()); });

  const int rows = a.rows(), merges = int(s.split.size()) * rows;
  const bool shared = merges * s.partitions >= 256;  // fewer are done before a worker wakes up
  e.pool.run(merges, shared ? threads : 1, [&](int i, int) { kernel.merge(a, s.split[i / rows], i % rows); });
}

}  // namespace

void decode(const Problem& a, const Request& request) {
  check_blocks(a);
  const Kernel& kernel = kernel_for(a);
  Engine& e = engine();
  std::lock_guard<std::mutex> turn(e.turn);
  const int wanted = threads();
  Schedule s = make_schedule(a, request, wanted);
  if (s.partial_floats) place_partials(a, s, static_cast<float*>(e.partials.reserve(s.partial_floats * sizeof(float))));
  const int used = e.pool.grow(std::min(wanted, int(s.tasks.size())));
  run_schedule(a, s, kernel, used, e);
  std::lock_guard<std::mutex> lock(e.record_lock);
  e.record = {request.ticket, s.partitions, s.tile, used, int(s.tasks.size()), kernel.name};
}

Record last_run() {
  Engine& e = engine();
  std::lock_guard<std::mutex> lock(e.record_lock);
  return e.record;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernel* kernel : kernels()) names.push_back(kernel->name);
  return names;
}

std::string isa() { return current().name; }

void set_isa(const std::string& name) {
  if (name.empty()) return void(chosen = nullptr);
  for (const Kernel* kernel : kernels())
    if (name == kernel->name) return void(chosen = kernel);
  throw std::invalid_argument("[set_isa] expected one that this CPU runs; got '" + name + "'");
}

int threads() {
  static const int cores = usable_cores();
  const int count = thread_count.load(std::memory_order_relaxed);
  return count ? count : cores;
}

void set_threads(int count) {
  if (count < 1) throw std::invalid_argument("[set_threads] expected at least 1; got " + std::to_string(count));
  thread_count = count;
}

}  // namespace mla
