#include "cases.h"

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>

using mla::Dtype;

std::string Shape::text() const {
  std::ostringstream s;
  s << (dtype == Dtype::f32   ? "f32 "
        : dtype == Dtype::f16 ? "f16 "
                              : "bf16 ")
    << rank << '+' << rope << " heads " << heads << " q_len " << q_len << " block " << block_size << " gap " << gap
    << " lengths";
  for (int n : lengths) s << ' ' << n;
  return s.str();
}

int Case::slots() const { return *std::max_element(lengths.begin(), lengths.end()); }
int Case::pages() const { return shape.block_size ? (slots() + shape.block_size - 1) / shape.block_size : 0; }

char* Case::slot(char* base, int sequence, int token, int64_t stride) const {
  const int size = shape.block_size;
  const int64_t at = size ? int64_t(table[sequence * pages() + token / size]) * size + token % size
                          : int64_t(sequence) * slots() + token;
  return base + at * stride * bytes();
}

// Random numbers of the dtype with exponents -3 .. 1, built bit by bit.
void Case::fill(char* at, int numbers) {
  for (int i = 0; i < numbers; ++i, at += bytes()) {
    const uint32_t r = random_(), sign = r >> 31;
    const int exponent = int(r >> 23 & 0xff) % 5 - 3;
    uint32_t bits = sign << 31 | uint32_t(exponent + 127) << 23 | (r & 0x7fffff);
    if (shape.dtype == Dtype::bf16) bits >>= 16;
    if (shape.dtype == Dtype::f16) bits = sign << 15 | uint32_t(exponent + 15) << 10 | (r & 0x3ff);
    std::memcpy(at, &bits, bytes());
  }
}

double Case::number(const char* base, int64_t index) const {
  uint32_t bits = 0;
  std::memcpy(&bits, base + index * bytes(), bytes());
  if (shape.dtype == Dtype::f16) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    const double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                        : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                       : std::ldexp(mantissa, -24);
    return bits >> 15 ? -size : size;
  }
  if (shape.dtype == Dtype::bf16) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void Case::fill_cache() {
  const int batch = int(lengths.size());
  const int64_t tokens = int64_t(shape.block_size ? shape.block_size * (batch * pages() + 1) : batch * slots());
  const int64_t latent_bytes = tokens * latent_stride() * bytes();
  const int64_t rope_bytes = shape.block_size ? 0 : tokens * rope_stride() * bytes();
  latent.reset(new char[std::max<int64_t>(latent_bytes, 1)]);
  rope.reset(new char[std::max<int64_t>(rope_bytes, 1)]);
  std::memset(latent.get(), 0xff, latent_bytes);  // NaN in every dtype
  std::memset(rope.get(), 0xff, rope_bytes);
  ASAN_POISON_MEMORY_REGION(latent.get(), latent_bytes);
  ASAN_POISON_MEMORY_REGION(rope.get(), rope_bytes);
  auto use = [&](char* at, int numbers) {
    ASAN_UNPOISON_MEMORY_REGION(at, numbers * bytes());
    fill(at, numbers);
  };
  for (int b = 0; b < batch; ++b)
    for (int t = starts[b]; t < lengths[b]; ++t) {
      use(slot(latent.get(), b, t, latent_stride()), shape.rank + (shape.block_size ? shape.rope : 0));
      if (!shape.block_size && shape.rope) use(slot(rope.get(), b, t, rope_stride()), shape.rope);
    }
}

Case::Case(const Shape& s, uint32_t seed) : shape(s), lengths(s.lengths), starts(s.starts), random_(seed) {
  const int batch = int(lengths.size()), rows = shape.heads * shape.q_len;
  starts.resize(batch, 0);
  std::vector<int32_t> blocks(batch * pages() + 1);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random_);
  table.assign(blocks.begin(), blocks.end() - 1);
  fill_cache();
  for (int b = 0; b < batch && shape.block_size; ++b)  // entries past the end are wild
    for (int i = (lengths[b] + shape.block_size - 1) / shape.block_size; i < pages(); ++i) table[b * pages() + i] = -7;
  auto queries = [&](std::unique_ptr<char[]>& q, int width) {
    q.reset(new char[std::max(1, batch * rows * width * bytes())]);
    fill(q.get(), batch * rows * width);
  };
  queries(q_nope, shape.rank);
  queries(q_pe, shape.rope);
  out.reset(new char[batch * rows * shape.rank * bytes()]);
  std::memset(out.get(), 0xff, batch * rows * shape.rank * bytes());
  lse.assign(batch * rows, NAN);
}

mla::Problem Case::problem() {
  mla::Problem a{};
  const int q = shape.q_len, heads = shape.heads;
  a.batch = int(lengths.size());
  a.heads = heads;
  a.q_len = q;
  a.rank = shape.rank;
  a.rope = shape.rope;
  a.dtype = shape.dtype;
  a.scale = 0.05f;
  a.query = {q_nope.get(),
             q_pe.get(),
             {heads * q * shape.rank, q * shape.rank, shape.rank},
             {heads * q * shape.rope, q * shape.rope, shape.rope}};
  const int64_t outer = shape.block_size ? shape.block_size : slots();
  a.cache = {latent.get(),
             rope.get(),
             outer * latent_stride(),
             latent_stride(),
             outer * rope_stride(),
             rope_stride(),
             nullptr,
             0,
             0,
             0,
             0};
  if (shape.block_size) {
    a.cache.rope = latent.get() + shape.rank * bytes();
    a.cache.table = table.data();
    a.cache.table_row = pages();
    a.cache.table_column = 1;
    a.cache.blocks = a.batch * pages() + 1;
    a.cache.block_size = shape.block_size;
  }
  a.lengths = lengths.data();
  a.starts = starts.data();
  a.out = out.get();
  a.lse = lse.data();
  return a;
}

std::vector<double> Case::token(int sequence, int t) const {
  std::vector<double> x(shape.rank + shape.rope);
  const char* at = slot(latent.get(), sequence, t, latent_stride());
  const char* more = shape.block_size ? at + shape.rank * bytes() : slot(rope.get(), sequence, t, rope_stride());
  for (int d = 0; d < shape.rank + shape.rope; ++d)
    x[d] = d < shape.rank ? number(at, d) : number(more, d - shape.rank);
  return x;
}

std::vector<double> Case::query(int64_t row) const {
  std::vector<double> q(shape.rank + shape.rope);
  for (int d = 0; d < shape.rank; ++d) q[d] = number(q_nope.get(), row * shape.rank + d);
  for (int d = 0; d < shape.rope; ++d) q[shape.rank + d] = number(q_pe.get(), row * shape.rope + d);
  return q;
}

double Case::row_error(const std::vector<std::vector<double>>& tokens, int sequence, int head, int j) const {
  const int64_t row = (int64_t(sequence) * shape.heads + head) * shape.q_len + j;
  const std::vector<double> q = query(row);
  std::vector<double> sum(shape.rank, 0.0);
  double total = 0;  // scores are small here: no running maximum needed
  for (int t = starts[sequence]; t < lengths[sequence] - shape.q_len + 1 + j; ++t) {
    const std::vector<double>& x = tokens[t];
    const double weight = std::exp(0.05f * std::inner_product(q.begin(), q.end(), x.begin(), 0.0));
    total += weight;
    for (int d = 0; d < shape.rank; ++d) sum[d] += weight * x[d];
  }
  double error = 0, size = 0;
  for (int d = 0; d < shape.rank; ++d) {
    const double want = total ? sum[d] / total : 0, got = number(out.get(), row * shape.rank + d);
    error += (got - want) * (got - want);
    size += want * want;
  }
  if (total == 0) return error == 0 && lse[row] == -INFINITY ? 0 : INFINITY;
  const double bound = shape.dtype == Dtype::f32 ? 1e-5 : shape.dtype == Dtype::f16 ? 4e-4 : 2.5e-3;
  const double worst = std::max(std::sqrt(error / size) / bound, std::abs(lse[row] - std::log(total)) / 2e-5);
  return std::isnan(worst) ? INFINITY : worst;
}

double Case::error() const {
  double worst = 0;
  for (int b = 0; b < int(lengths.size()); ++b) {
    std::vector<std::vector<double>> tokens(lengths[b]);
    for (int t = starts[b]; t < lengths[b]; ++t) tokens[t] = token(b, t);
    for (int h = 0; h < shape.heads; ++h)
      for (int j = 0; j < shape.q_len; ++j) worst = std::max(worst, row_error(tokens, b, h, j));
  }
  return worst;
}
