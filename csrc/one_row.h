// The whole of a task with one row, which waits for memory rather than for arithmetic: the scores of the next tokens
// are worked out between the values of these, so that the cache is read evenly and in the order of its addresses.
#pragma once
#include "answer.h"

namespace mla::MLA_ISA {
namespace {

constexpr int kTogether = 8;  // tokens of one softmax step: with the next ones they fit in L1
// Tokens between the prefetch of a cache line, into L1, and its use. With 2, 3, 4, 6, 8 one row
// is 1.07, 1.15, 1.14, 1.13, 1.09 times as fast as without this file (32K bfloat16, Xeon of the Skylake kind, g++ 12,
// 2026-11-30).
constexpr int kEarly = 4;
static_assert(kTogether == 8 && kTile % kTogether == 0 && (kTile + kBeyond) % kBlock == 0);
static_assert(kTogether - 1 + kTogether + kEarly < kTogether + kBeyond);

template <typename T>
MLA_INLINE void prefetch(const T* from, int numbers) {
  MLA_UNROLL(8)
  for (int i = 0; i < numbers; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// A token's score is the sum of the lanes. Asks for the same numbers of the token kEarly later.
template <typename T, int kRank>
MLA_INLINE Vec products_of_one(const float* q, const T* const* latent, const T* const* rope, int rope_dims) {
  Vec acc[4] = {};
  for (int d = 0; d < kRank; d += 4 * W) {
    prefetch(latent[kEarly] + d, 4 * W);
    Two a = widen(latent[0] + d), b = widen(latent[0] + d + 2 * W);
    acc[0] += a.x * load(q + d);
    acc[1] += a.y * load(q + d + W);
    acc[2] += b.x * load(q + d + 2 * W);
    acc[3] += b.y * load(q + d + 3 * W);
  }
  prefetch(rope[kEarly], rope_dims);
  for (int d = 0; d < rope_dims; d += 2 * W) {
    Two a = widen(rope[0] + d);
    acc[0] += a.x * load(q + kRank + d);
    acc[1] += a.y * load(q + kRank + d + W);
  }
  return (acc[0] + acc[1]) + (acc[2] + acc[3]);
}

// O += P V for D registers of dims.
template <typename T, int D>
MLA_INLINE void values_of_one(const T* const* latent, const float* p, float* o, int dim) {
  Vec acc[D];
  MLA_UNROLL(8)
  for (int j = 0; j < D; ++j) acc[j] = load(o + dim + j * W);
  MLA_UNROLL(8)
  for (int t = 0; t < kTogether; ++t) {
    Vec w = all(p[t]);
    MLA_UNROLL(8)
    for (int j = 0; j < D; j += 2) {
      Two v = widen(latent[t] + dim + j * W);
      acc[j] += v.x * w;
      acc[j + 1] += v.y * w;
    }
  }
  MLA_UNROLL(8)
  for (int j = 0; j < D; ++j) store(o + dim + j * W, acc[j]);
}

// From products to weights of the tokens [first, first + kTogether), of which those before `seen` count. O and the sum
// are scaled anew only where the maximum grows, which is seldom: nothing waits for it.
template <int kRank>
MLA_INLINE void weigh(const float* products, int first, int seen, float* o, float* p, float& most, Vec& total) {
  auto at = [&](int i) MLA_INLINE_LAMBDA { return load(products + i * W); };
  Vec x = eight(sums(at(0), at(1), at(2), at(3)), sums(at(4), at(5), at(6), at(7)));
  if (first + kTogether > seen) {
    store(p, x);
    for (int i = 0; i < kTogether; ++i)
      if (first + i >= seen) p[i] = -__builtin_inff();
    x = load(p);
  }
  const float highest = largest(x);
  if (highest > most) {
    const Vec alpha = exp2_of_nonpositive(all(most - highest));
    most = highest;
    total *= alpha;
    for (int d = 0; d < kRank; d += W) store(o + d, load(o + d) * alpha);
  }
  x = exp2_of_nonpositive(x - most);
  total += x;
  store(p, x);
}

template <typename T, int kRank>
void attend_one(const Problem& a, const Task& task, const float* q, float* o, float* most, float* sum) {
  constexpr int D = kRank / kTogether / W;  // registers of values after each score
  static_assert(D % 2 == 0 && D * kTogether * W == kRank);
  const int rope_dims = a.rope;
  const int end = task.token1, seen = least(end, open_end(a, task.sequence) + task.row0 % a.q_len);
  alignas(64) float products[kTogether * W], p[W];
  float highest = *most;
  Vec total{};
  Tile<T> tile;
  for (int d = 0; d < kRank; d += W) store(o + d, Vec{});
  auto score = [&](int t, int i) MLA_INLINE_LAMBDA {
    store(products + i * W, products_of_one<T, kRank>(q, tile.latent + t + i, tile.rope + t + i, rope_dims));
  };
  for (int start = task.token0; start < end; start += kTile) {
    locate(a, task.sequence, start, least(kTile + kBeyond, end - start), tile);
    for (int t = tile.n; t < kTile + kBeyond; ++t) {
      tile.latent[t] = tile.latent[tile.n - 1];
      tile.rope[t] = tile.rope[tile.n - 1];
    }
    if (start == task.token0)
      for (int i = 0; i < kTogether; ++i) score(0, i);
    for (int t = 0; t < kTile && start + t < end; t += kTogether) {
      weigh<kRank>(products, start + t, seen, o, p, highest, total);
      const bool more = start + t + kTogether < end;
      for (int i = 0; i < kTogether; ++i) {
        if (more) score(t + kTogether, i);
        values_of_one<T, D>(tile.latent + t, p, o, i * D * W);
      }
    }
  }
  *most = highest;
  *sum = sums(total, Vec{}, Vec{}, Vec{})[0];
}

}  // namespace
}  // namespace mla::MLA_ISA
