// The worker threads of the CPU kernel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace mla {

// Workers sleep between calls, and spin briefly before they do: layers follow each other closely. They are never
// joined: a pool that has started some must live as long as the process.
class Pool {
 public:
  // Starts workers until `threads` can work, the caller among them; returns how many really can.
  int grow(int threads);

  // Calls body(task, worker) for each task on up to `threads` threads; the caller is worker 0. One caller at a time.
  template <typename Body>
  void run(int tasks, int threads, const Body& body) {
    if (threads <= 1 || tasks <= 1) {
      for (int i = 0; i < tasks; ++i) body(i, 0);
      return;
    }
    run_shared(tasks, threads, &body,
               [](const void* b, int task, int worker) { (*static_cast<const Body*>(b))(task, worker); });
  }

 private:
  using Call = void (*)(const void* body, int task, int worker);
  void run_shared(int tasks, int threads, const void* body, Call call);
  void drain(uint32_t generation, int worker);
  void work(int id);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<uint64_t> ticket_{0};  // call number << 32 | next task
  std::atomic<int> tasks_{0}, done_{0}, active_{0};
  const void* body_ = nullptr;
  Call call_ = nullptr;
};

}  // namespace mla
