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

// One group of rows: P[token][row], O[row][rank], alpha[row] = what the old O is worth now.
struct Group {
  const float* p;
  float* o;
  const float* alpha;
  int rank;
  bool first;  // O holds nothing yet
  Group from_row(int r) const { return {p + r, o + size_t(r) * rank, alpha + r, rank, first}; }
};

// Dims [dim, dim + D * W) of R rows; they begin `at` numbers into each of the values. `keep`, if wanted, receives V as
// float [n][D * W].
template <typename T, int R, int D, bool kKeep = false>
inline void values(const Group& z, int dim, const Spans<T>& v, int at, Ahead& next, float* keep = nullptr) {
  static_assert(D % 2 == 0);
  // Cache lines of the next tile a token: those that scores_* left, spread over the passes of about 512 / (D * W).
  constexpr int kSteps = R == kMostRows ? sizeof(T) / 4 : (576 * int(sizeof(T)) / 128 * D * W + 511) / 512;
  Ahead ahead = next;
  float* o = z.o + dim;
  Vec acc[R][D];
  MLA_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    MLA_UNROLL(8)
    for (int j = 0; j < D; ++j) acc[r][j] = z.first ? Vec{} : load(o + r * z.rank + j * W) * z.alpha[r];
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
    for (int j = 0; j < D; ++j) store(o + r * z.rank + j * W, acc[r][j]);
  }
}

template <typename T, int R = 1>
void values_of_few(int rows, const Group& z, const Tile<T>& tile, Ahead& ahead) {
  if constexpr (R < kMostRows) {
    if (rows != R) return values_of_few<T, R + 1>(rows, z, tile, ahead);
    constexpr int D = vectors_at_once(R);
    for (int dim = 0; dim < z.rank; dim += D * W) values<T, R, D>(z, dim, tile.values, dim, ahead);
  }
}

constexpr int kKept = vectors_at_once(kMostRows) * W;  // dims a pass

// All rows of a group, kMostRows at a time. A block of dims stays in L1 while the rows pass over it; halves are
// converted by the first pass and read as float by the others.
template <typename T>
void values_of_group(int rows, const Group& z, const Tile<T>& tile, const Spans<float>& kept, float* keep,
                     Ahead& ahead) {
  constexpr int R = kMostRows, D = vectors_at_once(R);
  const int whole = rows / R * R;
  for (int dim = 0; dim < z.rank && whole; dim += kKept) {
    if (sizeof(T) == 4 || whole == R) {
      for (int r = 0; r < whole; r += R) values<T, R, D>(z.from_row(r), dim, tile.values, dim, ahead);
    } else {
      values<T, R, D, true>(z, dim, tile.values, dim, ahead, keep);
      for (int r = R; r < whole; r += R) values<float, R, D>(z.from_row(r), dim, kept, 0, ahead);
    }
  }
  if (rows > whole) values_of_few<T>(rows - whole, z.from_row(whole), tile, ahead);
}

}  // namespace
}  // namespace mla::MLA_ISA
