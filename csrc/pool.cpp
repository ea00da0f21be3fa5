#include "pool.h"

#include <system_error>

namespace mla {
namespace {

constexpr int kSpins = 2000;  // about 50 us: longer than the gap between two layers' calls
constexpr uint32_t kClosed = 0x7fffffff;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int Pool::grow(int threads) {
  try {
    while (int(workers_.size()) < threads - 1) {
      int id = int(workers_.size()) + 1;
      workers_.emplace_back([this, id] { work(id); });
    }
  } catch (const std::system_error&) {
    // The system gives no more threads: work with those we have.
  }
  return std::min(threads, int(workers_.size()) + 1);
}

void Pool::run_shared(int tasks, int threads, const void* body, Call call) {
  const uint32_t generation = generation_.load() + 1;
  ticket_.store(uint64_t(generation) << 32 | kClosed);  // shut out workers that are still leaving the last call
  body_ = body;
  call_ = call;
  tasks_ = tasks;
  done_ = 0;
  active_ = threads - 1;
  ticket_.store(uint64_t(generation) << 32, std::memory_order_release);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.store(generation, std::memory_order_release);
  }
  wake_.notify_all();
  drain(generation, 0);
  for (int spins = 0; done_.load(std::memory_order_acquire) < tasks; ++spins)
    if (spins > kSpins) std::this_thread::yield();
}

// A worker that wakes too late finds another call's number and takes nothing. So the caller waits for tasks, never for
// a thread that the system has not scheduled yet (that cost 10-15 % at 2K tokens on two busy cores, 2026-11-29).
void Pool::drain(uint32_t generation, int worker) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (ticket >> 32 == generation && int(uint32_t(ticket)) < tasks_) {
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    call_(body_, int(uint32_t(ticket)), worker);
    done_.fetch_add(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void Pool::work(int id) {
  for (uint32_t seen = 0;;) {
    for (int spins = 0; spins < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spins) relax();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load() != seen; });
      seen = generation_.load();
    }
    if (id <= active_) drain(seen, id);
  }
}

}  // namespace mla
