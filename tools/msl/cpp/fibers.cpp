// Fibers, and what they synchronise by: barriers and simdgroup operations.
#include <algorithm>
#include <cstdlib>

#include "worker.h"

#ifndef __x86_64__
#error "the fiber switch is written for x86-64"
#endif

// msl_switch(save, to): pushes what a callee must keep, stores the stack pointer in *save, continues at `to`.
extern "C" void msl_switch(void** save, void* to);
asm(R"(
  .text
  .globl msl_switch
  .hidden msl_switch
  .type msl_switch, @function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size msl_switch, .-msl_switch
)");

namespace msl {

thread_local Group* group;
uint64_t counts[COUNTS];

// --- scheduling

void make_ready(Lane& lane) {
  Worker& w = worker();
  lane.state = READY;
  w.ready[w.ready_last++ % kRing] = lane.thread;
}

// Leaves the running fiber (or the scheduler) for the next one that can run, or for the scheduler.
void run_next(void** save) {
  Worker& w = worker();
  if (w.ready_first == w.ready_last) {
    w.current = nullptr;
    msl_switch(save, w.scheduler_stack);
    return;
  }
  if (w.shuffle) {  // another legal order
    w.random = w.random * 6364136223846793005u + 1442695040888963407u;
    uint pick = w.ready_first + (w.random >> 33) % (w.ready_last - w.ready_first);
    std::swap(w.ready[w.ready_first % kRing], w.ready[pick % kRing]);
  }
  Lane& next = w.lanes[w.ready[w.ready_first++ % kRing]];
  next.state = RUNNING;
  w.current = &next;
  if (save != &next.stack_pointer) msl_switch(save, next.stack_pointer);
}

void wait(State state, int site, const char* name) {
  Lane& me = *group->current;
  me.state = state;
  me.site = site;
  me.waits_at = name;
  run_next(&me.stack_pointer);
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  add_report(nullptr, format, arguments);
  va_end(arguments);
  group->failed = true;
  wait(FAILED, 0, "");
  abort();  // nobody wakes a failed lane
}

namespace {

void fiber_main() {
  Worker& w = worker();
  msl_kernel.entry();
  Lane& me = *w.current;
  Simd& simd = w.simds[me.simd];
  w.returned++;
  simd.returned++;
  me.state = RETURNED;
  if (simd.arrived || w.at_barrier) w.failed = true;
  if (simd.arrived)
    report(nullptr, "divergence: lane %u of simdgroup %u returned, others wait at %s site %d", me.lane, me.simd,
           simd.name, simd.site);
  else if (w.at_barrier)
    report(nullptr, "divergence: a thread returned, others wait at threadgroup_barrier site %d", w.barrier_site);
  run_next(&me.stack_pointer);
  abort();  // nobody continues a lane that has returned
}

}  // namespace

void prepare_stack(Worker& w, Lane& lane) {
  // Staggered, so that the lanes' stacks don't share cache sets.
  unsigned char* top = w.stacks + (lane.thread + 1) * kStackStride - 128 - lane.thread % 61 * 64;
  void** stack = (void**)(uintptr_t(top) & ~uintptr_t(15));
  *--stack = nullptr;
  *--stack = (void*)fiber_main;
  for (int saved_registers = 0; saved_registers < 6; saved_registers++) *--stack = nullptr;
  lane.stack_pointer = stack;
}

// --- synchronisation

void simd_entered(Simd& simd, int site, const char* name) {
  Lane& me = *group->current;
  if (simd.returned)
    fail("divergence: %s site %d in simdgroup %u, but %u of its lanes have returned", name, site, me.simd,
         simd.returned);
  if (simd.arrived && (simd.site != site || strcmp(simd.name, name)))
    fail("divergence: lane %u of simdgroup %u is at %s site %d, others wait at %s site %d", me.lane, me.simd, name,
         site, simd.name, simd.site);
  simd.site = site;
  simd.name = name;
  simd.arrived |= 1u << me.lane;
}

void simd_complete(Simd& simd) {
  Lane& me = *group->current;
  for (uint i = 0; i < kSimdWidth; i++)
    if (simd.arrived >> i & 1 && i != me.lane) make_ready(group->lanes[me.simd * kSimdWidth + i]);
  simd.arrived = 0;
  simd.operations++;
}

void simdgroup_barrier(uint flags, int site) {
  // The weakest flags of all lanes: memory that one of them leaves out is not fenced.
  (void)simd_operation<uint, char>(flags, site, "simdgroup_barrier", [](Slot* given, Slot*, uint32_t lanes) {
    Simd& simd = group->simds[group->current->simd];
    uint fenced = DEVICE_MEMORY | THREADGROUP_MEMORY;
    for (uint i = 0; i < kSimdWidth; i++)
      if (lanes >> i & 1) fenced &= in_slot<uint>(given[i]);
    count(SIMD_BARRIERS);
    if (fenced & DEVICE_MEMORY) simd.epoch[0]++;
    if (fenced & THREADGROUP_MEMORY) simd.epoch[1]++;
  });
}

void threadgroup_barrier(uint flags, int site) {
  Group& g = *group;
  if (g.returned) fail("divergence: threadgroup_barrier site %d, but %u threads have returned", site, g.returned);
  if (g.at_barrier && g.barrier_site != site)
    fail("divergence: threadgroup_barrier site %d, but others wait at threadgroup_barrier site %d", site,
         g.barrier_site);
  g.barrier_site = site;
  g.barrier_flags = g.at_barrier ? g.barrier_flags & flags : flags;
  if (++g.at_barrier < g.thread_count) return wait(AT_BARRIER, site, "threadgroup_barrier");
  g.at_barrier = 0;
  count(BARRIERS);
  if (g.barrier_flags & DEVICE_MEMORY) g.epoch[0]++;
  if (g.barrier_flags & THREADGROUP_MEMORY) g.epoch[1]++;
  for (Lane& lane : g.lanes)
    if (lane.state == AT_BARRIER) make_ready(lane);
}

void expect_full_simdgroup(int site) {
  uint lanes = group->simds[group->current->simd].lanes;
  if (lanes != kSimdWidth) fail("divergence: a matrix operation site %d in a simdgroup of %u lanes", site, lanes);
}

void matrix_multiply(MatrixElements& mine, int site) {
  expect_full_simdgroup(site);
  mine = simd_operation<MatrixElements, MatrixElements>(
      mine, site, "simdgroup_multiply_accumulate", [](Slot* given, Slot* result, uint32_t) {
        count(MATRIX_OPS);
        float left[8][8], right[8][8], sum[8][8];
        for (int lane = 0; lane < 32; lane++) {
          const auto& from = in_slot<MatrixElements>(given[lane]);
          int row = matrix_row(lane), column = matrix_column(lane);
          for (int k = 0; k < 2; k++) {
            left[row][column + k] = from.a[k];
            right[row][column + k] = from.b[k];
            sum[row][column + k] = from.c[k];
          }
        }
        for (int row = 0; row < 8; row++)
          for (int inner = 0; inner < 8; inner++)
            for (int column = 0; column < 8; column++) sum[row][column] += left[row][inner] * right[inner][column];
        for (int lane = 0; lane < 32; lane++)
          for (int k = 0; k < 2; k++)
            in_slot<MatrixElements>(result[lane]).c[k] = sum[matrix_row(lane)][matrix_column(lane) + k];
      });
}

// --- threadgroup memory

void* threadgroup_array(int id, const char* name, size_t bytes) {
  Group& g = *group;
  ThreadgroupArray& array = g.arrays[id];
  if (!array.start) {
    g.threadgroup_bytes += (bytes + 15) / 16 * 16;
    size_t start = (g.arena_used + kRedZone + 63) / 64 * 64;
    if (g.threadgroup_bytes > kThreadgroupBytes || start + bytes + kRedZone > kArena)
      fail("threadgroup memory: %zu bytes with `%s`, and %zu is all there is", g.threadgroup_bytes, name,
           kThreadgroupBytes);
    array = {g.arena + start, bytes, name};
    g.arena_used = start + bytes;
  }
  return array.start;
}

}  // namespace msl
