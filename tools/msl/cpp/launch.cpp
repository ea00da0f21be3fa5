// Runs a grid: guarded memory, threadgroups in turn, and the entry points that library.py calls.
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "checker.h"
#include "worker.h"

namespace msl {
namespace {

#ifdef MSL_CHECK
constexpr int kGuard = PROT_READ | PROT_WRITE;  // the checker reports first, then the access may go on
#else
constexpr int kGuard = PROT_NONE;
#endif

unsigned char* map(size_t bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    perror("msl emulator: mmap");
    abort();
  }
  return (unsigned char*)memory;
}

// Copies a buffer so that it ends (to 16 bytes) at a guard, and starts `past` a multiple of 16 bytes. What
// remains around it reads as NaN.
struct GuardedCopy {
  unsigned char *mapping, *data;
  size_t mapped;
  GuardedCopy(const void* from, size_t bytes, size_t past) {
    size_t room = (bytes + 16 + kPage - 1) / kPage * kPage;
    mapped = room + 2 * kDeviceGuard;
    mapping = map(mapped, kGuard);
    mprotect(mapping + kDeviceGuard, room, PROT_READ | PROT_WRITE);
    data = mapping + kDeviceGuard + room - bytes;
    data -= (size_t(data) - past) % 16;
    memset(mapping + kDeviceGuard, 0xff, data - mapping - kDeviceGuard);
    memcpy(data, from, bytes);
    memset(data + bytes, 0xff, mapping + kDeviceGuard + room - data - bytes);
  }
};

void start_group(Worker& w, uint64_t number) {
  const Launch& launch = *w.launch;
  w.number = uint(number) + 1;
  w.position = uint3(number % w.groups.x, number / w.groups.x % w.groups.y, number / w.groups.x / w.groups.y);
  for (int i = 0; i < 3; i++) {
    uint left = launch.threads[i] - w.position[i] * launch.group_size[i];
    w.size[i] = std::min(launch.group_size[i], left);
  }
  w.thread_count = w.size.x * w.size.y * w.size.z;
  w.returned = w.at_barrier = 0;
  w.failed = false;
  w.first_epoch = w.epoch[0] = w.epoch[1] = std::max(w.epoch[0], w.epoch[1]) + 1;
  w.arena_used = w.threadgroup_bytes = 0;
  memset(w.arrays, 0, sizeof w.arrays);
  memset(w.arena, 0xff, kArena);  // NaN
  w.lanes.resize(w.thread_count);
  w.simds.resize((w.thread_count + kSimdWidth - 1) / kSimdWidth);
  for (uint i = 0; i < w.simds.size(); i++) {
    Simd& simd = w.simds[i];
    simd.lanes = std::min(kSimdWidth, w.thread_count - i * kSimdWidth);
    simd.returned = simd.operations = simd.arrived = simd.epoch[0] = simd.epoch[1] = 0;
  }
  w.ready_first = w.ready_last = 0;
  for (uint i = 0; i < w.thread_count; i++) {
    Lane& lane = w.lanes[i];
    lane.thread = i;
    lane.simd = i / kSimdWidth;
    lane.lane = i % kSimdWidth;
    lane.position = uint3(i % w.size.x, i / w.size.x % w.size.y, i / w.size.x / w.size.y);
    prepare_stack(w, lane);
    make_ready(lane);
  }
}

void run_group(Worker& w, uint64_t number) {
  start_group(w, number);
  run_next(&w.scheduler_stack);
#ifdef MSL_CHECK
  counts[THREADGROUP_BYTES] = std::max(counts[THREADGROUP_BYTES], uint64_t(w.threadgroup_bytes));
#endif
  if (w.returned == w.thread_count || w.failed) return;
  for (Lane& lane : w.lanes)
    if (lane.state != RETURNED)
      return report(nullptr, "stuck: %u of %u threads returned, thread %u waits at %s site %d", w.returned,
                    w.thread_count, lane.thread, lane.waits_at, lane.site);
}

void work(const Launch& launch, std::atomic<uint64_t>& next, uint64_t shuffle) {
  Worker w{};
  group = &w;
  w.launch = &launch;
  w.shuffle = shuffle != 0;
  w.random = shuffle;
  w.nominal_size = uint3(launch.group_size[0], launch.group_size[1], launch.group_size[2]);
  for (int i = 0; i < 3; i++) w.groups[i] = (launch.threads[i] + launch.group_size[i] - 1) / launch.group_size[i];
  uint threads = launch.group_size[0] * launch.group_size[1] * launch.group_size[2];
  w.stacks_bytes = threads * kStackStride;
  w.stacks = map(w.stacks_bytes, PROT_READ | PROT_WRITE);
  for (uint i = 0; i < threads; i++) mprotect(w.stacks + i * kStackStride, kPage, PROT_NONE);
  w.arena_map = map(kArena + 2 * kArenaGuard, kGuard);
  w.arena = w.arena_map + kArenaGuard;
  mprotect(w.arena, kArena, PROT_READ | PROT_WRITE);
  std::vector<unsigned char> signal_stack(65536);
  stack_t alternative{}, previous;
  alternative.ss_sp = signal_stack.data();
  alternative.ss_size = signal_stack.size();
  sigaltstack(&alternative, &previous);

  uint64_t total = uint64_t(w.groups.x) * w.groups.y * w.groups.z;
  for (uint64_t i; !stop && (i = next++) < total;) run_group(w, i);

  sigaltstack(&previous, nullptr);
  munmap(w.arena_map, kArena + 2 * kArenaGuard);
  munmap(w.stacks, w.stacks_bytes);
  group = nullptr;
}

void run_grid(const Launch& launch, int workers, uint64_t shuffle) {
#ifdef MSL_CHECK
  workers = 1;  // the shadow memory is not locked
#endif
  std::atomic<uint64_t> next{0};
  std::vector<std::thread> others;
  for (int i = 1; i < workers; i++)
    others.emplace_back([&, i] { work(launch, next, shuffle ? shuffle + uint64_t(i) : 0); });
  work(launch, next, shuffle);
  for (auto& other : others) other.join();
}

}  // namespace

uint3 builtin(int kind) {
  const Group& g = *group;
  const Lane& me = *g.current;
  auto simds = [](uint3 size) { return (size.x * size.y * size.z + 31) / 32; };
  auto quads = [](uint3 size) { return (size.x * size.y * size.z + 3) / 4; };
  switch (kind) {
    case THREADGROUP_POSITION_IN_GRID:
      return g.position;
    case THREAD_POSITION_IN_THREADGROUP:
      return me.position;
    case THREAD_POSITION_IN_GRID:
      return g.position * g.nominal_size + me.position;
    case THREADGROUPS_PER_GRID:
      return g.groups;
    case GRID_SIZE:
    case THREADS_PER_GRID:
      return uint3(g.launch->threads[0], g.launch->threads[1], g.launch->threads[2]);
    case GRID_ORIGIN:
      return uint3(0u);
    case THREADS_PER_THREADGROUP:
      return g.size;
    case DISPATCH_THREADS_PER_THREADGROUP:
      return g.nominal_size;
    case THREAD_INDEX_IN_THREADGROUP:
      return uint3(me.thread);
    case THREAD_INDEX_IN_SIMDGROUP:
      return uint3(me.lane);
    case THREAD_INDEX_IN_QUADGROUP:
      return uint3(me.thread % 4);
    case SIMDGROUP_INDEX_IN_THREADGROUP:
      return uint3(me.simd);
    case QUADGROUP_INDEX_IN_THREADGROUP:
      return uint3(me.thread / 4);
    case SIMDGROUPS_PER_THREADGROUP:
      return uint3(simds(g.size));
    case QUADGROUPS_PER_THREADGROUP:
      return uint3(quads(g.size));
    case DISPATCH_SIMDGROUPS_PER_THREADGROUP:
      return uint3(simds(g.nominal_size));
    case DISPATCH_QUADGROUPS_PER_THREADGROUP:
      return uint3(quads(g.nominal_size));
    default:  // THREADS_PER_SIMDGROUP, THREAD_EXECUTION_WIDTH
      return uint3(kSimdWidth);
  }
}

}  // namespace msl

// --- entry points

#define MSL_EXPORT extern "C" __attribute__((visibility("default")))

MSL_EXPORT const char* msl_reports() { return msl::report_text(); }

MSL_EXPORT const uint64_t* msl_counts() { return msl::counts; }

// Returns the count of reports.
MSL_EXPORT int msl_launch(const msl::Launch* user, int workers, uint64_t shuffle) {
  using namespace msl;
  memset(counts, 0, sizeof counts);
  clear_reports();
  Launch launch = *user;
  std::vector<GuardedCopy> copies;
  for (Buffer& buffer : launch.buffers)
    if (buffer.data) {
      copies.emplace_back(buffer.data, buffer.bytes, buffer.past);
      buffer.data = copies.back().data;
    }
  catch_signals();
  check_launch(launch);
  run_grid(launch, workers, shuffle);
  check_done();
  release_signals();
  for (uint i = 0; i < kMaxBuffers; i++)
    if (launch.buffers[i].writable) memcpy(user->buffers[i].data, launch.buffers[i].data, launch.buffers[i].bytes);
  for (auto& copy : copies) munmap(copy.mapping, copy.mapped);
  return report_count();
}
