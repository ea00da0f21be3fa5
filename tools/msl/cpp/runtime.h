// What a kernel on the CPU needs at run time. Each thread of a threadgroup is a fiber; fibers switch
// only at barriers and at simdgroup operations. One threadgroup at a time runs on an OS thread.
#pragma once

#include <source_location>
#include <utility>
#include <vector>

#include "types.h"

namespace msl {

constexpr uint kMaxThreads = 1024, kSimdWidth = 32, kMaxBuffers = 31, kMaxArrays = 64, kSlotBytes = 64;
constexpr size_t kThreadgroupBytes = 32768;  // what Apple GPUs grant

// The emulator's own accesses to its own memory: not for the checker.
#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

enum State { READY, RUNNING, IN_SIMD_OPERATION, AT_BARRIER, FAILED, RETURNED };
enum BarrierFlag : uint { DEVICE_MEMORY = 1, THREADGROUP_MEMORY = 2 };

// A place in the text as one number, which library.py reads in reports: line * 1024 + column.
constexpr int site(std::source_location at) { return int(at.line() << 10 | (at.column() & 1023)); }

struct Lane {
  void* stack_pointer;
  uint thread, simd, lane;  // index in the threadgroup, of the simdgroup, in the simdgroup
  uint3 position;           // in the threadgroup
  State state;
  int site;  // where it waits
  const char* waits_at;
};

typedef unsigned char Slot[kSlotBytes];

// What a launch did; library.py has the same list. Only checked builds count.
enum Count : int {
  MATRIX_OPS,
  SIMD_OPS,
  BARRIERS,
  SIMD_BARRIERS,
  FMAS,
  EXP2S,
  THREADGROUP_READ,
  THREADGROUP_WRITTEN,
  THREADGROUP_BYTES,  // the largest of all threadgroups
  BUFFER_READ,
  BUFFER_WRITTEN = BUFFER_READ + kMaxBuffers,
  COUNTS = BUFFER_WRITTEN + kMaxBuffers,
};
extern uint64_t counts[COUNTS];
MSL_UNCHECKED inline void count(int what, uint64_t n = 1) {
#ifdef MSL_CHECK
  counts[what] += n;  // a checked launch has one worker
#else
  (void)what, (void)n;
#endif
}

struct Simd {
  // Two sets in turn: a lane may enter the next operation before the others have read this one.
  alignas(64) Slot given[2][kSimdWidth];
  alignas(64) Slot result[2][kSimdWidth];
  uint lanes, returned, operations;
  uint32_t arrived;  // mask of the lanes that wait in the current operation
  int site;
  const char* name;
  uint epoch[2];  // counts simdgroup_barriers: [device, threadgroup] memory
};

struct Buffer {
  unsigned char* data;
  uint64_t bytes;
  uint64_t writable;
  uint64_t past;  // a multiple of 16 bytes: how far the kernel sees it start
};

// Mirrored by library.py.
struct Launch {
  Buffer buffers[kMaxBuffers];
  uint32_t threads[3];     // of the whole grid
  uint32_t group_size[3];  // groups at the grid's edge may be smaller
};

struct Argument {
  int kind, index;
  const char* name;
};
struct Kernel {
  void (*entry)();
  const Argument* arguments;
  int argument_count;
};

struct ThreadgroupArray {
  unsigned char* start;
  size_t bytes;
  const char* name;
};

struct Group {
  const Launch* launch;
  uint3 position, groups, size, nominal_size;
  uint number;  // linear position + 1
  uint thread_count;
  std::vector<Lane> lanes;
  std::vector<Simd> simds;
  Lane* current;  // nullptr: the scheduler itself runs
  uint returned, at_barrier;
  int barrier_site;
  uint barrier_flags;
  uint epoch[2];     // counts threadgroup_barriers: [device, threadgroup] memory
  uint first_epoch;  // of this threadgroup: separates it from the one before
  bool failed;
  unsigned char* stacks;  // private memory
  size_t stacks_bytes;
  unsigned char* arena;  // threadgroup memory
  size_t arena_used, threadgroup_bytes;
  ThreadgroupArray arrays[kMaxArrays];
};
extern thread_local Group* group;

void wait(State state, int site, const char* name);  // until another lane makes this one ready
void fail(const char* format, ...);                  // reports, and stops this lane for good
void simd_entered(Simd& simd, int site, const char* name);
void simd_complete(Simd& simd);
void threadgroup_barrier(uint flags, int site);
void simdgroup_barrier(uint flags, int site);
void* threadgroup_array(int id, const char* name, size_t bytes);

template <class T>
MSL_UNCHECKED inline T& in_slot(Slot& slot) {
  static_assert(sizeof(T) <= kSlotBytes);
  return *reinterpret_cast<T*>(slot);
}

// Every lane gives a value; the last to arrive computes all results; every lane gets its own.
// compute(Slot* given, Slot* result, uint32_t lanes): `lanes` is the mask of the lanes taking part.
template <class Given, class Result, class Compute>
MSL_UNCHECKED inline Result simd_operation(const Given& given, int site, const char* name, Compute compute) {
  Lane& me = *group->current;
  Simd& simd = group->simds[me.simd];
  uint set = simd.operations & 1;
  in_slot<Given>(simd.given[set][me.lane]) = given;
  simd_entered(simd, site, name);
  if (uint(__builtin_popcount(simd.arrived)) == simd.lanes) {
    compute(simd.given[set], simd.result[set], simd.arrived);
    simd_complete(simd);
  } else {
    wait(IN_SIMD_OPERATION, site, name);
  }
  return in_slot<Result>(simd.result[set][me.lane]);
}

template <class T, class Combine>
inline T simd_reduce(T value, int site, const char* name, Combine combine) {
  return simd_operation<T, T>(value, site, name, [combine](Slot* given, Slot* result, uint32_t lanes) MSL_UNCHECKED {
    count(SIMD_OPS);
    // A tree, as hardware does: rounding differs from a running sum.
    T tree[kSimdWidth];
    bool taken[kSimdWidth];
    for (uint i = 0; i < kSimdWidth; i++) {
      taken[i] = lanes >> i & 1;
      if (taken[i]) tree[i] = in_slot<T>(given[i]);
    }
    for (uint half_width = kSimdWidth / 2; half_width; half_width /= 2)
      for (uint i = 0; i < half_width; i++)
        if (taken[i + half_width]) {
          tree[i] = taken[i] ? combine(tree[i], tree[i + half_width]) : tree[i + half_width];
          taken[i] = true;
        }
    for (uint i = 0; i < kSimdWidth; i++) in_slot<T>(result[i]) = tree[0];
  });
}

// source(lane, argument) names the lane to read. From a lane that is not there comes 0xff.. (NaN).
template <class T, class Source>
inline T simd_exchange(T value, int argument, int site, const char* name, Source source) {
  struct Given {
    T value;
    int argument;
  };
  Given mine{value, argument};
  return simd_operation<Given, T>(mine, site, name, [source](Slot* given, Slot* result, uint32_t lanes) MSL_UNCHECKED {
    count(SIMD_OPS);
    for (uint i = 0; i < kSimdWidth; i++) {
      if (!(lanes >> i & 1)) continue;
      int from = source(int(i), in_slot<Given>(given[i]).argument);
      bool there = from >= 0 && from < int(kSimdWidth) && (lanes >> from & 1);
      if (there)
        in_slot<T>(result[i]) = in_slot<Given>(given[from]).value;
      else
        memset(result[i], 0xff, sizeof(T));
    }
  });
}

// Which elements of an 8x8 matrix a lane holds: this row, this column and the next.
inline int matrix_row(int lane) { return (lane >> 4 & 1) * 4 + (lane >> 1 & 3); }
inline int matrix_column(int lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }

struct MatrixElements {
  float a[2], b[2], c[2];  // a lane's
};
void matrix_multiply(MatrixElements& mine, int site);  // c += a * b
void expect_full_simdgroup(int site);

// --- How a launcher calls a kernel: each parameter is filled by what its attribute says.

enum Kind {
  BUFFER,
  THREADGROUP_POSITION_IN_GRID,
  THREAD_POSITION_IN_THREADGROUP,
  THREAD_POSITION_IN_GRID,
  THREADGROUPS_PER_GRID,
  THREADS_PER_GRID,
  THREADS_PER_THREADGROUP,
  DISPATCH_THREADS_PER_THREADGROUP,
  GRID_ORIGIN,
  GRID_SIZE,
  THREAD_INDEX_IN_THREADGROUP,
  THREAD_INDEX_IN_SIMDGROUP,
  THREAD_INDEX_IN_QUADGROUP,
  SIMDGROUP_INDEX_IN_THREADGROUP,
  QUADGROUP_INDEX_IN_THREADGROUP,
  SIMDGROUPS_PER_THREADGROUP,
  QUADGROUPS_PER_THREADGROUP,
  DISPATCH_SIMDGROUPS_PER_THREADGROUP,
  DISPATCH_QUADGROUPS_PER_THREADGROUP,
  THREADS_PER_SIMDGROUP,
  THREAD_EXECUTION_WIDTH,
};

uint3 builtin(int kind);

template <class P>
inline P fill(const Argument& argument) {
  if constexpr (std::is_pointer_v<P>) {
    return (P)group->launch->buffers[argument.index].data;
  } else if constexpr (std::is_reference_v<P>) {
    using Value = std::remove_reference_t<P>;
    const Buffer& given = group->launch->buffers[argument.index];
    if (given.bytes != sizeof(Value))
      fail("wrong size: buffer %d (%s) has %lu bytes, the kernel takes %zu", argument.index, argument.name, given.bytes,
           sizeof(Value));
    return *(Value*)given.data;
  } else if constexpr (std::is_arithmetic_v<P>) {
    return P(builtin(argument.kind).x);
  } else {
    P value;
    uint3 from = builtin(argument.kind);
    for (uint i = 0; i < 3 && i < sizeof(P) / sizeof(value[0]); i++) value[i] = from[i];
    return value;
  }
}
template <class... P, size_t... I>
inline void call_with(void (*kernel)(P...), const Argument* arguments, std::index_sequence<I...>) {
  kernel(fill<P>(arguments[I])...);
}
template <class... P>
inline void call(void (*kernel)(P...), const Argument* arguments) {
  call_with(kernel, arguments, std::index_sequence_for<P...>{});
}

}  // namespace msl

extern const msl::Kernel msl_kernel;  // written by translate.py behind the kernel
