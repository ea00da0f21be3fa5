// Leaves when it began by the GPU's clock, waits for `wait_us`, leaves when it ended, in nanoseconds. One thread.
// `after` is not read: who writes it comes first. The second bound holds where that clock should stand still.
unsigned long long started, now;
asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(started)::"memory");  // before all loads and stores
const unsigned long long longest_us = 50000;
const long long longest_cycles = 1ll << 28;  // a seventh of a second at 2 GHz
const long long cycle = clock64();
const unsigned long long asked_us = wait_us[0] > 0 ? wait_us[0] : 0;
const unsigned long long wait_ns = 1000 * (asked_us < longest_us ? asked_us : longest_us);
began[0] = started;
do {
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
} while (now - started < wait_ns && clock64() - cycle < longest_cycles);
ended[0] = now;
