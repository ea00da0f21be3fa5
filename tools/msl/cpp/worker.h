// Inside the runtime: what one OS thread owns, and the memory that kernels may touch.
#pragma once

#include <atomic>
#include <cstdarg>

#include "runtime.h"

namespace msl {

constexpr size_t kPage = 4096, kStack = 65536, kStackStride = kPage + kStack;  // a guard page below each
constexpr size_t kDeviceGuard = size_t(1) << 30;  // unused addresses on either side of a device buffer
constexpr size_t kArena = 65536, kArenaGuard = 1 << 20, kRedZone = 64;
constexpr uint kRing = 2 * kMaxThreads;

struct Worker : Group {
  unsigned char* arena_map;
  void* scheduler_stack;
  uint ready[kRing], ready_first, ready_last;
  bool shuffle;
  uint64_t random;
  const void *fault_address, *fault_pc;
  int fault_signal;
};
inline Worker& worker() { return *static_cast<Worker*>(group); }

// fibers.cpp
void make_ready(Lane& lane);
void run_next(void** save);
void prepare_stack(Worker& w, Lane& lane);

// faults.cpp
extern std::atomic<bool> stop;
void clear_reports();
int report_count();
const char* report_text();
void report(const void* pc, const char* format, ...);
void add_report(const void* pc, const char* format, va_list arguments);
const char* buffer_name(int index);
void catch_signals();
void release_signals();

}  // namespace msl
