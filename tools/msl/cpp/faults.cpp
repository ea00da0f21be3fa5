// Reports, and the signals of kernels that touch what they must not.
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "worker.h"

namespace msl {

std::atomic<bool> stop;

namespace {

constexpr int kShown = 20;  // reports of one launch
std::mutex report_mutex;
std::string reports;
int reported_count;
std::set<std::tuple<const void*, std::string, uint>> reported;
struct sigaction old_segv, old_bus, old_ill;

}  // namespace

void clear_reports() {
  reports.clear();
  reported.clear();
  reported_count = 0;
  stop = false;
}

int report_count() { return reported_count; }
const char* report_text() { return reports.c_str(); }

void add_report(const void* pc, const char* format, va_list arguments) {
  char text[400], where[120], pc_text[40] = "";
  vsnprintf(text, sizeof text, format, arguments);
  const Group& g = *group;
  snprintf(where, sizeof where, "; thread %u of threadgroup (%u, %u, %u)", g.current ? g.current->thread : 0,
           g.position.x, g.position.y, g.position.z);
  if (pc) {
    Dl_info module;
    dladdr((void*)&msl_kernel, &module);
    snprintf(pc_text, sizeof pc_text, " @%#lx", long((const char*)pc - (const char*)module.dli_fbase));
  }
  std::lock_guard<std::mutex> lock(report_mutex);
  // A race in a loop is one fault, and so is a divergence that stops many lanes: report it once.
  std::string kind(text, strcspn(text, ":"));
  if (!reported.insert({pc, kind, pc ? 0 : g.number}).second) return;
  if (reported_count++ < kShown) reports += std::string(text) + where + pc_text + "\n";
}

void report(const void* pc, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  add_report(pc, format, arguments);
  va_end(arguments);
}

const char* buffer_name(int index) {
  for (int i = 0; i < msl_kernel.argument_count; i++)
    if (msl_kernel.arguments[i].kind == BUFFER && msl_kernel.arguments[i].index == index)
      return msl_kernel.arguments[i].name;
  return "?";
}

namespace {

void describe_fault() {
  Worker& w = worker();
  auto address = (const unsigned char*)w.fault_address;
  if (w.fault_signal == SIGILL)
    return report(w.fault_pc,
                  "undefined behaviour: an index outside an array, a bad shift, an overflow, or a vector "
                  "that is not aligned");
  const unsigned char* stack = w.stacks + w.current->thread * kStackStride;
  if (address >= stack && address < stack + kPage)
    return report(w.fault_pc, "stack overflow: a thread uses more than %zu bytes of private memory", kStack);
  if (address >= w.arena_map && address < w.arena_map + kArena + 2 * kArenaGuard)
    return report(w.fault_pc, "out of bounds: threadgroup memory");
  for (uint i = 0; i < kMaxBuffers; i++) {
    const Buffer& buffer = w.launch->buffers[i];
    long offset = address - buffer.data, bytes = long(buffer.bytes);
    if (buffer.data && offset > -long(kDeviceGuard) && offset < bytes + long(kDeviceGuard))
      return report(w.fault_pc, "out of bounds: buffer %u (%s) of %ld bytes, at offset %ld", i, buffer_name(int(i)),
                    bytes, offset);
  }
  report(w.fault_pc, "wild address: %p, or a vector that is not aligned", w.fault_address);
}

// Continues here, on the fiber's own (emptied) stack, after the signal handler.
void after_fault() {
  describe_fault();
  group->failed = true;
  stop = true;
  wait(FAILED, 0, "");
  abort();
}

void on_signal(int signal_number, siginfo_t* info, void* context) {
  if (!group || !group->current) {  // not a kernel's fault
    signal(signal_number, SIG_DFL);
    return;
  }
  Worker& w = worker();
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  w.fault_signal = signal_number;
  w.fault_address = info->si_addr;
  w.fault_pc = (const void*)(registers[REG_RIP] + 1);  // like a return address: one past the place
  registers[REG_RSP] = greg_t(w.stacks + (w.current->thread + 1) * kStackStride - 72);
  registers[REG_RIP] = greg_t(&after_fault);
}

}  // namespace

void catch_signals() {
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  sigaction(SIGILL, &action, &old_ill);
}

void release_signals() {
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaction(SIGILL, &old_ill, nullptr);
}

}  // namespace msl
