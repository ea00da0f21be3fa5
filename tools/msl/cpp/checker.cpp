// The checked mode. Kernels are compiled with -fsanitize=thread, whose calls before each memory access come
// here instead of to libtsan: no library, no real threads, and so the same result every time.
#include "checker.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "worker.h"

namespace msl {
namespace {

// What is known of one byte. All zero: never touched. Thread and simdgroup numbers are within a threadgroup,
// whose number is kept beside them; an epoch is the count of barriers that order this kind of memory.
struct Cell {
  uint32_t write_group, write_epoch, write_simd_epoch;
  uint16_t write_thread;
  bool read_by_other_group;  // an earlier threadgroup
  uint32_t read_group, read_epoch, read_simd_epoch;
  uint32_t read_simds;   // mask of the simdgroups that have read it in this epoch
  uint32_t read_lanes;   // if only one has: mask of its lanes, in its own epoch
  uint32_t first_epoch;  // threadgroup memory: of the threadgroup that initialised it
};

struct Access {
  const unsigned char* start;
  size_t bytes;
  bool write;
  const void* pc;
  const char* verb() const { return write ? "write to" : "read of"; }
};

struct Memory {
  bool threadgroup;
  const char* name;
  const unsigned char* start;
  size_t bytes;
  Cell* cells;  // nullptr: nobody may write, so nothing can race
};

Memory buffers[kMaxBuffers];
Cell* arena_cells;

// Pages of it that are never touched cost nothing.
Cell* map_cells(size_t bytes) {
  void* cells = mmap(nullptr, (bytes + 1) * sizeof(Cell), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (cells == MAP_FAILED) {
    perror("msl emulator: mmap of shadow memory");
    abort();
  }
  return (Cell*)cells;
}
void unmap_cells(Cell* cells, size_t bytes) { munmap(cells, (bytes + 1) * sizeof(Cell)); }

// Has another thread's write or read of this byte no barrier between itself and `me`?
bool unordered_write(const Cell& cell, bool threadgroup, uint simd_epoch) {
  const Group& g = *group;
  const Lane& me = *g.current;
  if (!cell.write_group) return false;
  if (cell.write_group != g.number) return !threadgroup;  // nothing orders two threadgroups
  if (cell.write_thread == me.thread || cell.write_epoch != g.epoch[threadgroup]) return false;
  bool same_simd = cell.write_thread / kSimdWidth == me.simd;
  return !(same_simd && cell.write_simd_epoch < simd_epoch);
}
bool unordered_read(const Cell& cell, bool threadgroup, uint simd_epoch) {
  const Group& g = *group;
  const Lane& me = *g.current;
  if (!threadgroup && (cell.read_by_other_group || (cell.read_group && cell.read_group != g.number))) return true;
  if (cell.read_group != g.number || cell.read_epoch != g.epoch[threadgroup]) return false;
  uint32_t my_simd = 1u << me.simd, my_lane = 1u << me.lane;
  if (cell.read_simds & ~my_simd) return true;
  return cell.read_simds && cell.read_simd_epoch == simd_epoch && (cell.read_lanes & ~my_lane);
}

void note_write(Cell& cell, bool threadgroup, uint simd_epoch) {
  const Group& g = *group;
  cell.write_group = g.number;
  cell.write_epoch = g.epoch[threadgroup];
  cell.write_simd_epoch = simd_epoch;
  cell.write_thread = uint16_t(g.current->thread);
  cell.read_simds = cell.read_lanes = 0;
  cell.first_epoch = g.first_epoch;
}
void note_read(Cell& cell, bool threadgroup, uint simd_epoch) {
  const Group& g = *group;
  if (cell.read_group && cell.read_group != g.number) cell.read_by_other_group = true;
  if (cell.read_group != g.number || cell.read_epoch != g.epoch[threadgroup]) {
    cell.read_group = g.number;
    cell.read_epoch = g.epoch[threadgroup];
    cell.read_simds = 0;
  }
  uint32_t my_simd = 1u << g.current->simd, my_lane = 1u << g.current->lane;
  if (!cell.read_simds || cell.read_simd_epoch != simd_epoch) cell.read_lanes = 0;
  cell.read_simd_epoch = simd_epoch;
  cell.read_simds |= my_simd;
  cell.read_lanes |= my_lane;
}

void check_byte(const Memory& memory, const Access& access, long offset, Cell& cell, uint simd_epoch) {
  const char* kind = memory.threadgroup ? "threadgroup memory" : "device memory";
  uint first_epoch = group->first_epoch;
  if (memory.threadgroup && !access.write && cell.first_epoch != first_epoch) {
    report(access.pc, "uninitialised: read of %s `%s` at offset %ld", kind, memory.name, offset);
    cell.first_epoch = first_epoch;
  }
  bool race = unordered_write(cell, memory.threadgroup, simd_epoch);
  const char* earlier = "a write";
  if (!race && access.write) {
    race = unordered_read(cell, memory.threadgroup, simd_epoch);
    earlier = "a read";
  }
  if (race) {
    report(access.pc, "race: %s %s `%s` at offset %ld, not ordered after %s by another thread", access.verb(), kind,
           memory.name, offset, earlier);
    cell = Cell{};  // once is enough
    cell.first_epoch = first_epoch;
  }
  access.write ? note_write(cell, memory.threadgroup, simd_epoch) : note_read(cell, memory.threadgroup, simd_epoch);
}

void check(const Memory& memory, const Access& access) {
  long offset = access.start - memory.start;
  if (offset < 0 || offset + access.bytes > memory.bytes)
    return report(access.pc, "out of bounds: %s %s `%s` of %zu bytes, at offset %ld, %zu bytes", access.verb(),
                  memory.threadgroup ? "threadgroup memory" : "device memory", memory.name, memory.bytes, offset,
                  access.bytes);
  if (!memory.cells) {
    if (access.write) report(access.pc, "read-only: write to the input `%s` at offset %ld", memory.name, offset);
    return;
  }
  uint simd_epoch = group->simds[group->current->simd].epoch[memory.threadgroup];
  for (size_t i = 0; i < access.bytes; i++)
    check_byte(memory, access, offset, memory.cells[offset + long(i)], simd_epoch);
}

// The threadgroup array that holds `address`; else the nearest one below it, else the first.
const ThreadgroupArray* array_at(const unsigned char* address) {
  const ThreadgroupArray* found = nullptr;
  for (const ThreadgroupArray& array : group->arrays) {
    if (!array.start) continue;
    bool first = !found || array.start < found->start, below = array.start <= address;
    if (!found || (found->start > address ? below || first : below && array.start > found->start)) found = &array;
  }
  return found;
}

}  // namespace

void on_access(const void* address, size_t bytes, bool write, const void* pc) {
  if (!group || !group->current || !bytes) return;
  Group& g = *group;
  Access access{(const unsigned char*)address, bytes, write, pc};
  if (access.start >= g.stacks && access.start < g.stacks + g.stacks_bytes) return;
  if (access.start >= g.arena - kArenaGuard && access.start < g.arena + kArena + kArenaGuard) {
    count(write ? THREADGROUP_WRITTEN : THREADGROUP_READ, bytes);
    if (const ThreadgroupArray* array = array_at(access.start))
      check({true, array->name, array->start, array->bytes, arena_cells + (array->start - g.arena)}, access);
    return;
  }
  for (uint i = 0; i < kMaxBuffers; i++) {
    const Memory& buffer = buffers[i];
    if (!buffer.start || access.start < buffer.start - kDeviceGuard) continue;
    if (access.start >= buffer.start + buffer.bytes + kDeviceGuard) continue;
    count((write ? BUFFER_WRITTEN : BUFFER_READ) + int(i), bytes);
    return check(buffer, access);
  }
  // The emulator's own.
}

void check_launch(const Launch& launch) {
  arena_cells = map_cells(kArena);
  for (uint i = 0; i < kMaxBuffers; i++) {
    const Buffer& buffer = launch.buffers[i];
    Cell* cells = buffer.writable ? map_cells(buffer.bytes) : nullptr;
    buffers[i] = {false, buffer.data ? buffer_name(int(i)) : "", buffer.data, buffer.bytes, cells};
  }
}

void check_done() {
  unmap_cells(arena_cells, kArena);
  for (Memory& buffer : buffers)
    if (buffer.cells) unmap_cells(buffer.cells, buffer.bytes);
}

}  // namespace msl

extern "C" {
#define HOOK(NAME, BYTES, WRITE) \
  void __tsan_##NAME(void* address) { msl::on_access(address, BYTES, WRITE, __builtin_return_address(0)); }
#define HOOKS(BYTES)                        \
  HOOK(read##BYTES, BYTES, false)           \
  HOOK(write##BYTES, BYTES, true)           \
  HOOK(unaligned_read##BYTES, BYTES, false) \
  HOOK(unaligned_write##BYTES, BYTES, true) \
  HOOK(volatile_read##BYTES, BYTES, false)  \
  HOOK(volatile_write##BYTES, BYTES, true)  \
  static_assert(true)
HOOKS(1);
HOOKS(2);
HOOKS(4);
HOOKS(8);
HOOKS(16);
void __tsan_read_range(void* address, unsigned long bytes) {
  msl::on_access(address, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, unsigned long bytes) {
  msl::on_access(address, bytes, true, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}

// A large struct or array is copied or cleared by a call, which the compiler doesn't announce: the linker
// sends those of the kernel here (--wrap).
void* __real_memcpy(void*, const void*, size_t);
void* __real_memmove(void*, const void*, size_t);
void* __real_memset(void*, int, size_t);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  msl::on_access(from, bytes, false, __builtin_return_address(0));
  msl::on_access(to, bytes, true, __builtin_return_address(0));
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  msl::on_access(from, bytes, false, __builtin_return_address(0));
  msl::on_access(to, bytes, true, __builtin_return_address(0));
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  msl::on_access(to, bytes, true, __builtin_return_address(0));
  return __real_memset(to, value, bytes);
}
}
