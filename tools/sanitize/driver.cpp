// driver cases | threads | overrun | overflow | race: the last three hold a fault that a sanitizer must find.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "cases.h"

using mla::Dtype;

namespace {

int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

void run(const Shape& shape, uint32_t seed, const mla::Request& request) {
  Case c(shape, seed);
  const mla::Problem problem = c.problem();
  mla::decode(problem, request);
  const double error = c.error();
  const std::string what = mla::isa() + " " + shape.text() + " partitions " + std::to_string(request.partitions) +
                           " tile " + std::to_string(request.tile) + ": error / bound " + std::to_string(error);
  expect(error <= 1, what);
  expect(mla::last_run().ticket == request.ticket && mla::last_run().isa == mla::isa(), what + ", record");
}

template <typename T>
T pick(std::mt19937& random, std::initializer_list<T> list) {
  return list.begin()[random() % list.size()];
}

Shape random_shape(std::mt19937& random) {
  Shape s;
  s.dtype = pick(random, {Dtype::f32, Dtype::f16, Dtype::bf16});
  const int geometry = int(random() % 4);
  s.rank = geometry < 2 ? 512 : 256;
  s.rope = geometry == 1 ? 0 : geometry == 3 ? 32 : 64;
  s.heads = pick(random, {1, 2, 3, 5, 8, 9, 12, 16, 20, 33, 63, 96, 128});
  s.q_len = s.heads > 20 ? 1 : pick(random, {1, 2, 3, 8});
  s.block_size = pick(random, {0, 0, 0, 8, 16, 24, 32, 64});
  s.gap = pick(random, {0, 0, 8, 64});
  const int batch = 1 + int(random() % 3), most = s.heads * s.q_len > 40 ? 140 : 400;
  for (int b = 0; b < batch; ++b) {
    const int length = pick(random, {0, 1, 2, 7, 31, 63, 64, 65, 100, 128, 129, 200, 321, 400});
    s.lengths.push_back(std::min(length, most));
    s.starts.push_back(s.block_size || random() % 2 ? 0 : int(random() % (s.lengths.back() + 1)));
  }
  return s;
}

void bad_blocks() {
  Case c({.block_size = 16, .lengths = {100, 30}}, 1);
  for (int wrong : {-1, 9999, INT_MIN, INT_MAX}) {
    c.table[3] = wrong;
    try {
      mla::decode(c.problem(), {});
      expect(false, "a wild block id is refused");
    } catch (const std::runtime_error&) {
    }
  }
}

// The parent's workers don't exist in the child.
void forked_child() {
  mla::set_threads(3);
  run({.heads = 5, .lengths = {300}}, 1, {3, 0, 1});
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    run({.heads = 5, .lengths = {300}}, 2, {3, 0, 2});
    _exit(failures || mla::last_run().threads != 3);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child works");
}

void cases() {
  std::mt19937 random(20261129);
  for (const std::string& isa : mla::isas()) {
    mla::set_isa(isa);
    int count = 0;
    for (int block_size : {0, 8, 16, 64})
      for (int heads : {1, 4, 7, 16, 20, 48})
        for (Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
          ++count;
          run({.dtype = dtype, .heads = heads, .block_size = block_size, .lengths = {65, 0, 130}}, count,
              {2, 0, count});
        }
    for (int i = 0; i < 150; ++i) {
      mla::set_threads(pick(random, {1, 2, 3}));
      const mla::Request request{pick(random, {1, 2, 3, 5, 8, 64}), pick(random, {0, 0, 1, 16, 5, 999}), ++count};
      run(random_shape(random), random(), request);
    }
    bad_blocks();
    std::printf("%s: %d cases\n", isa.c_str(), count);
  }
  mla::set_isa("");
  forked_child();
}

// Callers from several threads take turns; settings and the record may be touched at any time.
void threads() {
  std::atomic<bool> stop{false};
  std::thread meddler([&] {
    for (int i = 0; !stop; ++i) {
      mla::set_threads(1 + i % 4);
      mla::set_isa(mla::isas()[i % mla::isas().size()]);
      (void)mla::last_run();
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int id = 0; id < 4; ++id)
    callers.emplace_back([id, &wrong] {
      Case c({.dtype = Dtype::bf16, .rank = 256, .heads = 1 + 6 * id, .block_size = 16, .lengths = {300, 70}}, id);
      for (int i = 0; i < 60; ++i) {
        std::memset(c.out.get(), 0xff, c.lengths.size() * c.shape.heads * 256 * 2);
        mla::decode(c.problem(), {1 + i % 5, i % 3 * 4, 1});
        if (i % 10 == 9) wrong += c.error() > 1;
      }
    });
  for (auto& caller : callers) caller.join();
  stop = true;
  meddler.join();
  expect(wrong == 0, "callers at once");
  std::printf("4 callers, 1..4 threads each: %d calls\n", 4 * 60);
}

// One token more than the cache holds.
void overrun() {
  Case c({.heads = 16, .lengths = {100}}, 1);
  mla::Problem problem = c.problem();
  const int longer = 101;
  problem.lengths = &longer;
  mla::decode(problem, {});
}

// An offset that leaves int where the kernel itself uses 64 bits.
void overflow() {
  volatile int token = INT_MAX / 512;
  std::printf("%d\n", token * 576);
}

// The cache is written while it is read.
void race() {
  mla::set_threads(2);
  Case c({.heads = 16, .lengths = {2000}}, 1);
  std::thread writer([&] { std::memset(c.latent.get(), 0, 2000 * 512 * 4); });
  for (int i = 0; i < 20; ++i) mla::decode(c.problem(), {2, 0, 1});
  writer.join();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "cases") cases();
  if (mode == "threads") threads();
  if (mode == "overrun") overrun();
  if (mode == "overflow") overflow();
  if (mode == "race") race();
  return failures ? 1 : 0;
}
