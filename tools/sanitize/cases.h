// Random inputs for the kernel, and the truth about them in double precision.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu_decode.h"

struct Shape {
  mla::Dtype dtype = mla::Dtype::f32;
  int rank = 512, rope = 64, heads = 1, q_len = 1;
  int block_size = 0;                          // 0: dense
  int gap = 0;                                 // unused numbers behind each token
  std::vector<int> lengths = {}, starts = {};  // starts: dense only; empty: 0
  std::string text() const;
};

// Buffers end where their last number does, and every slot outside [start, length) is NaN and, under AddressSanitizer,
// poisoned: reading one ends the program.
class Case {
 public:
  Case(const Shape& shape, uint32_t seed);
  mla::Problem problem();
  // Largest error of a row (relative L2) over the dtype's bound; > 1 is a failure. LSE and exact zeros count too.
  double error() const;
  Shape shape;
  std::vector<int> lengths, starts;
  std::vector<int32_t> table;
  std::unique_ptr<char[]> latent, rope, q_nope, q_pe, out;
  std::vector<float> lse;

 private:
  void fill_cache();
  void fill(char* at, int numbers);
  char* slot(char* base, int sequence, int token, int64_t stride) const;
  double number(const char* base, int64_t index) const;
  std::vector<double> token(int sequence, int t) const;
  std::vector<double> query(int64_t row) const;
  double row_error(const std::vector<std::vector<double>>& tokens, int sequence, int head, int j) const;
  int bytes() const { return shape.dtype == mla::Dtype::f32 ? 4 : 2; }
  int slots() const;
  int pages() const;
  int64_t latent_stride() const { return (shape.block_size ? shape.rank + shape.rope : shape.rank) + shape.gap; }
  int64_t rope_stride() const { return shape.block_size ? latent_stride() : shape.rope + shape.gap; }
  std::mt19937 random_;
};
