// S = Q K^T for one group of rows and a few tokens.
//
// A full group keeps one row per lane (S[token][row]): the latent is broadcast number by number, softmax is vertical
// and nothing is reduced across lanes. A small last group (<= W/2 rows) keeps dims in the lanes and reduces at the end,
// so that 4 rows do not pay for 16.
#pragma once
#include "tokens.h"

namespace mla::MLA_ISA {
namespace {

constexpr int kChunk = 32;  // dims converted at a time: two buffers of 2 KB stay in L1 (4 KB ones would alias)
// Dims whose products make one sum: one chain of 576 additions errs more than MLX's products of matrices.
constexpr int kSection = 160;

// acc[g][t] += q[g][dim] * key[t][dim]
template <int G, int N>
MLA_INLINE void multiply(const float* q, size_t group, const float* key, int stride, Vec (&acc)[G][N]) {
  Vec x[G];
  MLA_UNROLL(2)
  for (int g = 0; g < G; ++g) x[g] = load(q + g * group);
  MLA_UNROLL(16)
  for (int t = 0; t < N; ++t) {
    Vec y = all(key[t * stride]);
    MLA_UNROLL(2)
    for (int g = 0; g < G; ++g) acc[g][t] += x[g] * y;
  }
}

// s = or += the products of a section of dims.
template <int G, int N>
MLA_INLINE void add_section(bool first, const Vec (&acc)[G][N], float* s) {
  MLA_UNROLL(2)
  for (int g = 0; g < G; ++g) {
    MLA_UNROLL(16)
    for (int t = 0; t < N; ++t) {
      float* at = s + (g * kTile + t) * W;
      store(at, first ? acc[g][t] : load(at) + acc[g][t]);
    }
  }
}

// Tokens [t, t + kBlock / G) of any layout: converted one chunk ahead, between the multiplications.
template <typename T, int G>
void scores_through_buffer(const float* q /*[G][dim][W]*/, const Tile<T>& tile, int first, const Problem& a,
                           float* s /*[G][kTile][W]*/, Ahead& next) {
  constexpr int N = kBlock / G, kLines = kChunk / (2 * W);
  constexpr int kStep = N * kLines < kChunk / 2 ? 4 : 2, kSteps = kChunk / kStep;  // dims a step
  static_assert(N * kLines % kSteps == 0);
  alignas(64) float buffer[2][N * kChunk];
  const T* const* token;
  int at;
  auto aim = [&](int dim) {
    token = (dim < a.rank ? tile.latent : tile.rope) + first;
    at = dim < a.rank ? dim : dim - a.rank;
  };
  auto convert = [&](float* to, int i) MLA_INLINE_LAMBDA {
    int t = i / kLines, d = i % kLines * 2 * W;
    Two v = widen(token[t] + at + d);
    store(to + t * kChunk + d, v.x);
    store(to + t * kChunk + d + W, v.y);
  };
  aim(0);
  for (int i = 0; i < N * kLines; ++i) convert(buffer[0], i);
  const int dim = a.dim();
  const size_t group = size_t(dim) * W;
  Ahead ahead = next;
  for (int section = 0; section < dim; section += kSection) {
    Vec acc[G][N] = {};
    for (int c = section; c < least(section + kSection, dim); c += kChunk) {
      const float* key = buffer[c / kChunk % 2];
      float* later = buffer[(c / kChunk + 1) % 2];
      aim(least(c + kChunk, dim - kChunk));
      for (int i = 0; i < kSteps; ++i) {
        MLA_UNROLL(2)
        for (int u = 0; u < kStep / 2; ++u)
          if (ahead.any()) ahead.step();
        MLA_UNROLL(4)
        for (int u = 0; u < N * kLines / kSteps; ++u) convert(later, i * (N * kLines / kSteps) + u);
        MLA_UNROLL(4)
        for (int u = 0; u < kStep; ++u)
          multiply<G, N>(q + (c + kStep * i + u) * W, group, key + kStep * i + u, kChunk, acc);
      }
    }
    add_section<G, N>(section == 0, acc, s);
  }
  next = ahead;
}

template <int G, int N, int kStride>
MLA_INLINE void scores_of_part(const float* q, size_t group, const float* key, int dims, Vec (&acc)[G][N],
                               Ahead& ahead) {
  for (int d = 0; d < dims; d += 4) {
    MLA_UNROLL(2)
    for (int u = 0; u < 2; ++u)
      if (ahead.any()) ahead.step();
    MLA_UNROLL(4)
    for (int u = 0; u < 4; ++u) multiply<G, N>(q + (d + u) * W, group, key + d + u, kStride, acc);
  }
}

// The same for floats whose tokens lie at strides known to the compiler: read where they are.
template <int G, int kLatentStride, int kRopeStride>
void scores_in_place(const float* q, const Tile<float>& tile, int first, const Problem& a, float* s, Ahead& next) {
  constexpr int N = kBlock / G;
  const size_t group = size_t(a.dim()) * W;
  Ahead ahead = next;
  for (int d = 0; d < a.rank; d += kSection) {
    const int dims = least(kSection, a.rank - d);
    Vec acc[G][N] = {};
    scores_of_part<G, N, kLatentStride>(q + d * W, group, tile.latent[first] + d, dims, acc, ahead);
    if (kRopeStride > 0 && d + dims == a.rank)
      scores_of_part<G, N, kRopeStride>(q + a.rank * W, group, tile.rope[first], a.rope, acc, ahead);
    add_section<G, N>(d == 0, acc, s);
  }
  next = ahead;
}

template <typename T>
struct ScoresByRow {
  using Function = void (*)(const float*, const Tile<T>&, int, const Problem&, float*, Ahead&);
  Function one, two;  // for one group of rows and for two at once
};

template <typename T>
constexpr ScoresByRow<T> kThroughBuffer = {scores_through_buffer<T, 1>, scores_through_buffer<T, 2>};
template <int kLatentStride, int kRopeStride>
constexpr ScoresByRow<float> kInPlace = {scores_in_place<1, kLatentStride, kRopeStride>,
                                         scores_in_place<2, kLatentStride, kRopeStride>};

// Buffered where the strides (in numbers) are not those of a packed cache or of a converted tile.
inline ScoresByRow<float> scores_for_strides(const Problem& a, int64_t latent, int64_t rope) {
  struct Known {
    int rank, rope, latent_stride, rope_stride;
    ScoresByRow<float> scores;
  };
  constexpr Known known[] = {
      {512, 64, 576, 576, kInPlace<576, 576>}, {512, 64, 512, 64, kInPlace<512, 64>},
      {512, 0, 512, 0, kInPlace<512, 0>},      {512, 0, 576, 0, kInPlace<576, 0>},
      {256, 64, 320, 320, kInPlace<320, 320>}, {256, 64, 256, 64, kInPlace<256, 64>},
      {256, 32, 288, 288, kInPlace<288, 288>}, {256, 32, 256, 32, kInPlace<256, 32>},
  };
  for (const Known& k : known)
    if (k.rank == a.rank && k.rope == a.rope && k.latent_stride == latent && (!a.rope || k.rope_stride == rope))
      return k.scores;
  return kThroughBuffer<float>;
}

// acc[.][r][t] += q[r] * token[t] over some dims, dims in the lanes. With C = 2 every other register of dims has its
// own sums: fewer than eight chains of additions would wait for each other.
template <typename T, int R, int N, int C>
MLA_INLINE void products_by_dim(const float* q, int dim, const T* const* token, int dims, Vec (&acc)[C][R * N],
                                Ahead& ahead) {
  const T* from[N];
  MLA_UNROLL(8)
  for (int t = 0; t < N; ++t) from[t] = token[t];
  for (int d = 0; d < dims; d += 2 * W) {
    for (int b = 0; b < N * W * int(sizeof(T)) && ahead.any(); b += 64) ahead.step();  // half here, half in values()
    Two key[N];
    MLA_UNROLL(8)
    for (int t = 0; t < N; ++t) key[t] = widen(from[t] + d);
    MLA_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      Vec x = load(q + r * dim + d), y = load(q + r * dim + d + W);
      MLA_UNROLL(8)
      for (int t = 0; t < N; ++t) acc[0][r * N + t] += x * key[t].x;
      MLA_UNROLL(8)
      for (int t = 0; t < N; ++t) acc[C - 1][r * N + t] += y * key[t].y;
    }
  }
}

// S[token][row] for R rows and N tokens.
template <typename T, int R, int N>
MLA_INLINE void scores_by_dim(const float* q /*[R][dim]*/, const Tile<T>& tile, int first, const Problem& a, float* s,
                              Ahead& next) {
  Ahead ahead = next;
  constexpr int n = R * N, C = n < 8 ? 2 : 1;
  Vec acc[C][n] = {};
  products_by_dim<T, R, N, C>(q, a.dim(), tile.latent + first, a.rank, acc, ahead);
  products_by_dim<T, R, N, C>(q + a.rank, a.dim(), tile.rope + first, a.rope, acc, ahead);
  next = ahead;
  auto chain = [&](int i) MLA_INLINE_LAMBDA {
    if (i >= n) return Vec{};
    return C == 2 ? acc[0][i] + acc[C - 1][i] : acc[0][i];
  };
  MLA_UNROLL(8)
  for (int i = 0; i < n; i += 4) {
    Four x = sums(chain(i), chain(i + 1), chain(i + 2), chain(i + 3));
    MLA_UNROLL(4)
    for (int j = 0; j < 4; ++j)
      if (i + j < n) s[(i + j) % N * W + (i + j) / N] = x[j];
  }
}

constexpr int tokens_at_once(int rows) { return rows <= (MLA_REGISTERS == 32 ? 5 : 2) ? 4 : 2; }

template <typename T, int R = 1>
void scores_of_few(int rows, const float* q, const Tile<T>& tile, int first, const Problem& a, float* s, Ahead& ahead) {
  if constexpr (R <= W / 2) {
    if (rows != R) return scores_of_few<T, R + 1>(rows, q, tile, first, a, s, ahead);
    constexpr int N = tokens_at_once(R);
    for (int t = 0; t < kBlock; t += N) scores_by_dim<T, R, N>(q, tile, first + t, a, s + t * W, ahead);
  }
}

}  // namespace
}  // namespace mla::MLA_ISA
