// Leaves when it began by the GPU's clock, waits for `wait_us`, leaves when it ended, in nanoseconds. One thread.
// `after` is not read: who writes it comes first. The second bound holds where that clock should stand still.
const unsigned long long longest_us = 50000;
const long long longest_cycles = 1ll << 28;  // a seventh of a second at 2 GHz
const unsigned long long asked_us = wait_us[0] > 0 ? wait_us[0] : 0;
const unsigned long long wait_ns = 1000 * (asked_us < longest_us ? asked_us : longest_us);
const long long cycle = clock64();
unsigned long long began, now;
asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
// Memory that the host has read comes back with the first write, within the wait.
times[0] = began;
__threadfence_system();
do {
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
} while (now - began < wait_ns && clock64() - cycle < longest_cycles);
times[1] = now;
