// O = O * alpha + P V for one group of rows: dims in the lanes, a few rows by a few registers, weights broadcast.
// Accumulators go to memory once a tile.
#pragma once
#include "tokens.h"

namespace mla::MLA_ISA {
namespace {

constexpr int kMostRows = MLA_REGISTERS == 32 ? 8 : 4;  // rows at a time

constexpr int vectors_at_once(int rows) {
  if (MLA_REGISTERS == 32) return rows <= 3 ? 8 : rows <= 6 ? 4 : 2;
  return rows == 1 ? 8 : rows == 2 ? 4 : 2;
}

// One group of rows: P[token][row], O[row][kRank], alpha[row] = what the old O is worth now. (A rank that the compiler
// knows is worth 2 % at 128 heads on Zen 3, 2026-11-29.)
template <int kRank>
struct Group {
  const float* p;
  float* o;
  const float* alpha;
  bool first;  // O holds nothing yet
  Group from_row(int r) const { return {p + r, o + size_t(r) * kRank, alpha + r, first}; }
};

// Dims [dim, dim + D * W) of R rows; they begin `at` numbers into each of the values. `keep`, if wanted, receives V as
// float [n][D * W].
template <typename T, int kRank, int R, int D, bool kKeep = false>
inline void values(const Group<kRank>& z, int dim, const Spans<T>& v, int at, Ahead& next, float* keep = nullptr) {
  static_assert(D % 2 == 0);
  // Cache lines of the next tile a token: those that scores_* left, spread over the passes of about 512 / (D * W).
  constexpr int kSteps = R == kMostRows ? sizeof(T) / 4 : (576 * int(sizeof(T)) / 128 * D * W + 511) / 512;
  Ahead ahead = next;
  float* o = z.o + dim;
  Vec acc[R][D];
  MLA_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    MLA_UNROLL(8)
    for (int j = 0; j < D; ++j) acc[r][j] = z.first ? Vec{} : load(o + r * kRank + j * W) * z.alpha[r];
  }
  const float* p = z.p;
  for (int i = 0; i < v.count; ++i) {
    const T* token = v.span[i].at + at;
    for (int left = v.span[i].count; left; --left, token += v.stride, p += W) {
      for (int step = 0; step < kSteps && ahead.any(); ++step) ahead.step();
      Vec x[D];
      MLA_UNROLL(8)
      for (int j = 0; j < D; j += 2) {
        Two two = widen(token + j * W);
        x[j] = two.x;
        x[j + 1] = two.y;
        if constexpr (kKeep) narrow(keep + j * W, two);
      }
      if constexpr (kKeep) keep += D * W;
      MLA_UNROLL(8)
      for (int r = 0; r < R; ++r) {
        Vec w = all(p[r]);
        MLA_UNROLL(8)
        for (int j = 0; j < D; ++j) acc[r][j] += x[j] * w;
      }
    }
  }
  next = ahead;
  MLA_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    MLA_UNROLL(8)
    for (int j = 0; j < D; ++j) store(o + r * kRank + j * W, acc[r][j]);
  }
}

template <typename T, int kRank, int R = 1>
void values_of_few(int rows, const Group<kRank>& z, const Tile<T>& tile, Ahead& ahead) {
  if constexpr (R < kMostRows) {
    if (rows != R) return values_of_few<T, kRank, R + 1>(rows, z, tile, ahead);
    constexpr int D = vectors_at_once(R);
    for (int dim = 0; dim < kRank; dim += D * W) values<T, kRank, R, D>(z, dim, tile.values, dim, ahead);
  }
}

constexpr int kKept = vectors_at_once(kMostRows) * W;  // dims a pass

// Tokens 1 KB or a multiple apart share a few sets of L1, which cannot hold a block of dims of 64 tokens.
inline bool crowds_sets(int64_t stride, size_t bytes) { return stride * int64_t(bytes) % 1024 == 0; }

// All rows of a group, kMostRows at a time. A block of dims stays in L1 while the rows pass over it; halves are
// converted by the first pass and read as float by the others, as are floats that L1 cannot hold where they are.
template <typename T, int kRank>
void values_of_group(int rows, int n, const Group<kRank>& z, const Tile<T>& tile, float* keep, Ahead& ahead) {
  constexpr int R = kMostRows, D = vectors_at_once(R);
  const int whole = rows / R * R;
  const bool keeps = whole > R && (sizeof(T) < 4 || crowds_sets(tile.values.stride, sizeof(T)));
  const Spans<float> kept = one_span<float>(keep, n, kKept);
  const Spans<float>* rest = &kept;  // what the passes after the first read
  if constexpr (sizeof(T) == 4) rest = keeps ? &kept : &tile.values;
  for (int dim = 0; dim < kRank && whole; dim += kKept) {
    int r = 0;
    if (keeps) {
      values<T, kRank, R, D, true>(z, dim, tile.values, dim, ahead, keep);
      r = R;
    } else if constexpr (sizeof(T) < 4) {
      values<T, kRank, R, D>(z, dim, tile.values, dim, ahead);
      r = R;
    }
    for (; r < whole; r += R) values<float, kRank, R, D>(z.from_row(r), dim, *rest, rest == &kept ? 0 : dim, ahead);
  }
  if (rows > whole) values_of_few<T, kRank>(rows - whole, z.from_row(whole), tile, ahead);
}

}  // namespace
}  // namespace mla::MLA_ISA
