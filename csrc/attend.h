// A task from queries to answer. Included once by a kernel_*.cpp, which defines MLA_NAME besides what lanes.h asks for.
#pragma once
#include "answer.h"
#include "scores.h"
#include "values.h"
#if defined(MLA_AVX512)
#include "one_row.h"
#endif

namespace mla::MLA_ISA {
namespace {

// For more than 32 rows a tile of halves is converted once, into L2. For fewer the conversion between the
// multiplications is faster: 2.3 against 3.9 ms at 1 head x 32K on Emerald Rapids, 3-7 % at 20 and 32 heads on Zen 3
// (2026-11-29).
inline bool converts_tile(const Problem& a, int rows) { return a.dtype != Dtype::f32 && rows > 32; }
// Not a multiple of 1 KB, see crowds_sets.
inline int converted_stride(const Problem& a) { return a.dim() == 512 ? 576 : a.dim(); }

// Up to three rows wait for memory (one has code of its own with AVX-512): what L1 holds comes from further away only
// once. 16 tokens against 64: 1.1-1.2x at 1 head x 32K in halves, 0-7 % at 2 heads, the same from 4 on (Emerald Rapids
// and Zen 3, 2026-11-29). O goes to memory once a tile: with 4 to 8 rows, 64 tokens are 1.07-1.17x as fast at 2K and
// 1.01-1.09x at 32K (Xeon of the Skylake kind, 32 KB of L1, 2026-12-01).
constexpr int tile_tokens(int rows) { return rows < 4 && rows <= W / 2 ? 16 : kTile; }

// A worker's memory, the same for every task of a call.
struct Scratch {
  float *scores, *alpha, *keep, *q, *o, *most, *sum, *converted;
  size_t bytes;
  Scratch(const Problem& a, int rows, void* memory) : bytes(0) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(memory);
    auto take = [&](size_t floats) {
      float* at = reinterpret_cast<float*>(base + bytes);
      bytes += (floats * sizeof(float) + 63) / 64 * 64;
      return at;
    };
    scores = take(size_t(kTile) * 2 * W);
    alpha = take(W);
    keep = take(size_t(kTile) * kKept);
    q = take(size_t(padded(rows)) * a.dim());
    o = take(size_t(rows) * a.rank);
    most = take(padded(rows));
    sum = take(padded(rows));
    converted = take(converts_tile(a, rows) ? size_t(kTile) * converted_stride(a) : 0);
  }
};

size_t scratch_bytes(const Problem& a, int rows) { return Scratch(a, rows, nullptr).bytes; }

// S -> P in place for n tokens; running maximum and sum; alpha = what the old sums are worth now.
inline void softmax(float* s, int n, float* most, float* sum, float* alpha) {
  Vec old = load(most), m = old;
  for (int t = 0; t < n; ++t) {
    Vec x = load(s + t * W);
    m = x > m ? x : m;
  }
  Vec total{};
  for (int t = 0; t < n; ++t) {
    Vec x = exp2_of_nonpositive(load(s + t * W) - m);
    total += x;
    store(s + t * W, x);
  }
  Vec a = exp2_of_nonpositive(old - m);
  store(alpha, a);
  store(most, m);
  store(sum, load(sum) * a + total);
}

// A group's queries as float, times the scale, in log2 units: [dim][W] for a full group, [rows][dim] for a small one.
template <typename T>
void pack_queries(const Problem& a, const Task& task, int first, int rows, float* q) {
  const float factor = a.scale * kLog2E;
  const int dim = a.dim();
  const T *nope[W], *rope[W];
  for (int r = 0; r < rows; ++r) {
    nope[r] = query_row<T>(a, a.query.nope, a.query.nope_strides, task.sequence, task.row0 + first + r);
    if (a.rope) rope[r] = query_row<T>(a, a.query.rope, a.query.rope_strides, task.sequence, task.row0 + first + r);
  }
  for (int d = 0; d < dim; d += 2 * W) {
    alignas(64) float block[W][2 * W] = {};
    for (int r = 0; r < rows; ++r) {
      Two v = widen(d < a.rank ? nope[r] + d : rope[r] + d - a.rank);
      narrow(rows <= W / 2 ? q + r * dim + d : block[r], {v.x * factor, v.y * factor});
    }
    if (rows <= W / 2) continue;
    for (int i = 0; i < 2 * W; ++i)
      for (int r = 0; r < W; ++r) q[(d + i) * W + r] = block[r][i];
  }
}

// What stays the same for all tiles of a task.
template <typename T>
struct Plan {
  ScoresByRow<T> scores;
  int readable;  // blocks of tokens may be read in place up to here, whatever the tile holds; 0: up to its last token
};

// Slots past the tile's last token never count: their scores may be anything, softmax and values() stop before them.
template <typename T, int kRank>
void attend_tile(const Problem& a, const Task& task, const Scratch& z, const Plan<T>& plan, const Tile<T>& tile,
                 Ahead& ahead) {
  const int rows = task.row1 - task.row0, groups = groups_of(rows), n = tile.n;
  const int readable = plan.readable ? plan.readable : n;
  for (int g = 0, step; g < groups; g += step) {
    const bool few = rows - g * W <= W / 2;
    step = rows - g * W > W + W / 2 ? 2 : 1;
    const float* q = z.q + size_t(g) * W * a.dim();
    const int block = kBlock / step;
    for (int t = 0; t < n; t += block) {
      float* s = z.scores + t * W;
      const ScoresByRow<T>& scores = t + block <= readable ? plan.scores : kThroughBuffer<T>;
      if (few) {
        scores_of_few<T>(rows - g * W, q, tile, t, a, s, ahead);
      } else {
        (step == 2 ? scores.two : scores.one)(q, tile, t, a, s, ahead);
      }
    }
    for (int i = g; i < g + step; ++i) {
      float* s = z.scores + (i - g) * kTile * W;
      const int here = least(W, rows - i * W);
      mask(a, task.sequence, task.row0 + i * W, here, tile.start, n, s);
      softmax(s, n, z.most + i * W, z.sum + i * W, z.alpha);
      const Group<kRank> group{s, z.o + size_t(i) * W * kRank, z.alpha, tile.start == task.token0};
      values_of_group<T, kRank>(here, n, group, tile, z.keep, ahead);
    }
  }
}

// Token blocks of a float cache can be read in place where they never straddle pages.
inline ScoresByRow<float> scores_for(const Problem& a, float) {
  if (a.cache.table && a.cache.block_size % kBlock) return kThroughBuffer<float>;
  return scores_for_strides(a, a.cache.latent_token, a.cache.rope_token);
}
template <typename T>
ScoresByRow<T> scores_for(const Problem&, T) {
  return kThroughBuffer<T>;
}

// A tile of floats in scratch memory, to be filled again and again.
inline void lay_out_converted(const Problem& a, float* memory, Tile<float>& tile) {
  for (int t = 0; t < kTile; ++t) {
    tile.latent[t] = memory + t * converted_stride(a);
    tile.rope[t] = tile.latent[t] + a.rank;
  }
}

template <typename T>
void convert_tile(const Problem& a, const Tile<T>& from, float* to, Tile<float>& tile) {
  tile.start = from.start;
  tile.n = from.n;
  tile.values = one_span<float>(to, from.n, converted_stride(a));
  for (int t = 0; t < from.n; ++t, to += converted_stride(a)) {
    for (int d = 0; d < a.rank; d += 2 * W) narrow(to + d, widen(from.latent[t] + d));
    for (int d = 0; d < a.rope; d += 2 * W) narrow(to + a.rank + d, widen(from.rope[t] + d));
  }
}

template <typename T, int kRank>
void attend(const Problem& a, const Task& task, const Scratch& z) {
  const int rows = task.row1 - task.row0, step = tile_tokens(rows);
#if defined(MLA_AVX512)
  if (rows == 1) return attend_one<T, kRank>(a, task, z.q, z.o, z.most, z.sum);
#endif
  const bool converts = converts_tile(a, rows);
  Tile<float> converted;
  if (converts) lay_out_converted(a, z.converted, converted);
  const Plan<float> converted_plan{scores_for_strides(a, converted_stride(a), converted_stride(a)), kTile};
  const Plan<T> plan{scores_for(a, T{}), 0};
  Tile<T> tiles[2];
  Tile<T>*tile = tiles, *next = tiles + 1;
  locate(a, task.sequence, task.token0, least(step, task.token1 - task.token0), *tile);
  for (int start = task.token0; start < task.token1; start += step) {
    const int coming = least(step, task.token1 - start - step);
    next->runs[0] = {nullptr, nullptr};
    if (coming > 0) locate(a, task.sequence, start + step, coming, *next);
    Ahead ahead(next->runs);
    if (converts) {
      convert_tile(a, *tile, z.converted, converted);
      attend_tile<float, kRank>(a, task, z, converted_plan, converted, ahead);
    } else {
      attend_tile<T, kRank>(a, task, z, plan, *tile, ahead);
    }
    Tile<T>* done = tile;
    tile = next;
    next = done;
  }
}

template <typename T>
void run_typed(const Problem& a, const Task& task, void* memory) {
  const int rows = task.row1 - task.row0;
  Scratch z(a, rows, memory);
  if (task.out) z.o = task.out;
  for (int r = 0; r < padded(rows); ++r) {
    z.most[r] = kNothing;
    z.sum[r] = 0;
  }
  if (task.token1 > task.token0) {
    for (int r = 0; r < rows; r += W) pack_queries<T>(a, task, r, least(W, rows - r), z.q + size_t(r) * a.dim());
    __builtin_memset(z.scores, 0, sizeof(float) * kTile * 2 * W);  // lanes without a row
    a.rank == 512 ? attend<T, 512>(a, task, z) : attend<T, 256>(a, task, z);
  }
  finish<T>(a, task, z.most, z.sum, [&](int r) { return z.o + size_t(r) * a.rank; });
}

void run(const Problem& a, const Task& task, void* memory) {
  if (a.dtype == Dtype::bf16) return run_typed<bf16>(a, task, memory);
  if (a.dtype == Dtype::f16) return run_typed<f16>(a, task, memory);
  run_typed<float>(a, task, memory);
}

void merge(const Problem& a, const Partials& parts, int row) {
  if (a.dtype == Dtype::bf16) return merge_typed<bf16>(a, parts, row);
  if (a.dtype == Dtype::f16) return merge_typed<f16>(a, parts, row);
  merge_typed<float>(a, parts, row);
}

}  // namespace

extern const Kernel kernel;
const Kernel kernel = {MLA_NAME, W, 1, scratch_bytes, run, merge};

}  // namespace mla::MLA_ISA
