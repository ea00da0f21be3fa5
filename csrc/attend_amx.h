// Attention for bfloat16 with AMX: a task from queries to answer. Rows come in groups of 16; a last group is filled up
// with zero queries.
//
// S^T = K Q^T reads K from the cache as it is. O += P V wants V as pairs of tokens, packed once for all groups, and P
// as bf16: two parts, high and low, keep 16 bits of it (one part would miss our bounds).
#pragma once
#include "amx.h"
#include "answer.h"

namespace mla::MLA_BASE {
extern const Kernel kernel;  // for the other dtypes
}

namespace mla::MLA_ISA {
namespace {

constexpr int kBlocks = kTile / kSide;  // of 16 tokens
constexpr int kSteps = kTile / kPairs;  // multiplications that P V needs for a tile
constexpr int kValueDims = 64;          // dims of V packed at a time: four registers of O
constexpr int kValueWords = kSteps * 4 * kWords;
constexpr int kWeightWords = kSteps * 2 * kWords;

// A worker's memory, the same for every task of a call. Words hold pairs of bf16.
struct Memory {
  uint32_t* queries;  // [group][dim / 32][16 pairs][16 rows]
  uint32_t* weights;  // [group][step][high, low][16 rows][16 pairs]
  uint32_t* pairs;    // [high, low][16 pairs][16 rows]
  uint32_t* values;   // [2][step][4][16 pairs][16]: of 64 dims even, odd, even, odd
  float* scores;      // [2][kTile][16 rows]
  float* o;           // [group][rank / 32][even, odd][16 rows][16]
  float* row;         // [rank]
  float *most, *sum, *alpha;
  bf16* copies;  // [kBlocks][16][dim]
  bf16* zeros;   // [rank]
  size_t bytes;
  Memory(const Problem& a, int rows, void* memory) : bytes(0) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(memory);
    auto take = [&](auto*& at, size_t numbers) {
      at = reinterpret_cast<decltype(+at)>(base + bytes);
      bytes += (numbers * sizeof(*at) + 63) / 64 * 64;
    };
    const size_t groups = groups_of(rows);
    take(queries, groups * a.dim() / kPairs * kWords);
    take(weights, groups * kWeightWords);
    take(pairs, 2 * kWords);
    take(values, 2 * kValueWords);
    take(scores, 2 * kTile * W);
    take(o, groups * a.rank * W);
    take(row, a.rank);
    take(most, groups * W);
    take(sum, groups * W);
    take(alpha, groups * W);
    take(copies, size_t(kTile) * a.dim());
    take(zeros, a.rank);
  }
};

// The task's queries as they are: products with them are exact, the scale comes later.
inline void pack_queries(const Problem& a, const Task& task, const Memory& z) {
  static const uint32_t nothing[kSide] = {};
  const int rows = task.row1 - task.row0;
  uint32_t* to = z.queries;
  for (int first = 0; first < rows; first += W)
    for (int dim = 0; dim < a.dim(); dim += kPairs, to += kWords) {
      const uint32_t* from[W];
      for (int r = 0; r < W; ++r) {
        const bool rope = dim >= a.rank;
        const bf16* q =
            first + r >= rows ? nullptr
            : rope ? query_row<bf16>(a, a.query.rope, a.query.rope_strides, task.sequence, task.row0 + first + r) +
                         dim - a.rank
                   : query_row<bf16>(a, a.query.nope, a.query.nope_strides, task.sequence, task.row0 + first + r) + dim;
        from[r] = q ? reinterpret_cast<const uint32_t*>(q) : nothing;
      }
      transpose(from, to);
    }
}

// 16 tokens at one distance from each other; strides in bytes.
struct Block {
  const bf16 *latent, *rope;
  int64_t latent_stride, rope_stride;
};

// Tokens [first, first + 16) of the tile: in the cache if they are all there and equally spaced, else copied. Slots
// past the last token are never touched, they may be NaN or unmapped.
inline Block block_of(const Problem& a, const Tile<bf16>& tile, int first, bf16* copy) {
  const int64_t stride = a.cache.latent_token;
  const bf16* at = tile.latent[first];
  bool even = first + kSide <= tile.n;
  for (int t = 1; t < kSide && even; ++t) even = tile.latent[first + t] == at + t * stride;
  if (even) return {at, tile.rope[first], 2 * stride, 2 * a.cache.rope_token};
  bf16* to = copy;
  for (int t = first; t < first + kSide; ++t, to += a.dim()) {
    if (t >= tile.n) {
      __builtin_memset(to, 0, sizeof(bf16) * a.dim());
      continue;
    }
    __builtin_memcpy(to, tile.latent[t], sizeof(bf16) * a.rank);
    if (a.rope) __builtin_memcpy(to + a.rank, tile.rope[t], sizeof(bf16) * a.rope);
  }
  return {copy, copy + a.rank, 2 * a.dim(), 2 * a.dim()};
}

// Registers 0 to 3 += some dims of four blocks of tokens with one group, or of two blocks with two groups; `next` is
// the distance to the second group's queries.
template <int kGroups>
MLA_INLINE void add_scores(const bf16* const (&token)[4], const int64_t (&stride)[4], const uint32_t* q, size_t next,
                           int dims, int lines, Ahead& ahead) {
  for (int d = 0; d < dims; d += kPairs, q += kWords) {
    for (int i = 0; i < lines && ahead.any(); ++i) ahead.step();
    amx_load<6>(q, kRowBytes);
    amx_load<4>(token[0] + d, stride[0]);
    amx_multiply<0, 4, 6>();
    amx_load<5>(token[1] + d, stride[1]);
    amx_multiply<1, 5, 6>();
    if constexpr (kGroups == 2) {
      amx_load<7>(q + next, kRowBytes);
      amx_multiply<2, 4, 7>();
      amx_multiply<3, 5, 7>();
    } else {
      amx_load<4>(token[2] + d, stride[2]);
      amx_multiply<2, 4, 6>();
      amx_load<5>(token[3] + d, stride[3]);
      amx_multiply<3, 5, 6>();
    }
  }
}

// S[group][token][row] of 64 tokens and one group, or of 32 tokens and two groups.
template <int kGroups>
inline void scores(const Problem& a, const Block* block, const uint32_t* q, float* s, int lines, Ahead& next) {
  const bf16 *latent[4], *rope[4];
  int64_t latent_stride[4], rope_stride[4];
  for (int i = 0; i < 4 / kGroups; ++i) {
    latent[i] = block[i].latent;
    rope[i] = block[i].rope;
    latent_stride[i] = block[i].latent_stride;
    rope_stride[i] = block[i].rope_stride;
  }
  Ahead ahead = next;
  const size_t group = size_t(a.dim()) / kPairs * kWords;
  amx_zero<0>();
  amx_zero<1>();
  amx_zero<2>();
  amx_zero<3>();
  add_scores<kGroups>(latent, latent_stride, q, group, a.rank, lines, ahead);
  add_scores<kGroups>(rope, rope_stride, q + size_t(a.rank) / kPairs * kWords, group, a.rope, lines, ahead);
  float* later = s + (kGroups == 2 ? kTile : 2 * kSide) * W;
  amx_store<0>(s, kRowBytes);
  amx_store<1>(s + kSide * W, kRowBytes);
  amx_store<2>(later, kRowBytes);
  amx_store<3>(later + kSide * W, kRowBytes);
  next = ahead;
}

// The largest of `least_most` and n scores times the factor, in four chains.
inline Vec largest(const float* s, int n, float factor, Vec least_most) {
  Vec m[4] = {least_most, least_most, least_most, least_most};
  auto see = [&](int t, Vec& most) MLA_INLINE_LAMBDA {
    Vec x = load(s + t * W) * factor;
    most = x > most ? x : most;
  };
  int t = 0;
  for (; t + 4 <= n; t += 4) {
    MLA_UNROLL(4)
    for (int i = 0; i < 4; ++i) see(t + i, m[i]);
  }
  for (; t < n; ++t) see(t, m[0]);
  m[0] = m[1] > m[0] ? m[1] : m[0];
  m[2] = m[3] > m[2] ? m[3] : m[2];
  return m[2] > m[0] ? m[2] : m[0];
}

// Two tokens' weights as pairs of bf16. The high part is cut off, so that the low part has the same sign and the sum of
// both is P to 2^-17.
MLA_INLINE void split(Vec x, Vec y, uint32_t* high, uint32_t* low) {
  *reinterpret_cast<BitsLoose*>(high) = paired(Bits(x), Bits(y));
  Vec x_rest = x - Vec(Bits(x) & kUpper), y_rest = y - Vec(Bits(y) & kUpper);
  *reinterpret_cast<BitsLoose*>(low) = paired(Bits(x_rest) + 0x8000u, Bits(y_rest) + 0x8000u);
}

// P of 32 tokens, the first n of which exist, as one step of P V wants it; the others weigh nothing. Returns sums.
inline Vec weights(const float* s, int n, float factor, Vec most, uint32_t* pairs, uint32_t* to) {
  Vec total{}, more{};
  auto weight = [&](int t) MLA_INLINE_LAMBDA { return exp2_of_nonpositive(load(s + t * W) * factor - most); };
  int t = 0;
  for (; t + 2 <= n; t += 2) {
    Vec x = weight(t), y = weight(t + 1);
    total += x;
    more += y;
    split(x, y, pairs + t / 2 * kSide, pairs + kWords + t / 2 * kSide);
  }
  for (; t < kPairs; t += 2) {
    Vec x = t < n ? weight(t) : Vec{};
    total += x;
    split(x, Vec{}, pairs + t / 2 * kSide, pairs + kWords + t / 2 * kSide);
  }
  const uint32_t* from[kSide];
  for (int part = 0; part < 2; ++part) {
    for (int i = 0; i < kSide; ++i) from[i] = pairs + part * kWords + i * kSide;
    transpose(from, to + part * kWords);
  }
  return total + more;
}

// S -> P for one group; running maximum and sum; alpha = what the old sums are worth now.
inline void softmax(const float* s, int n, float factor, int group, const Memory& z) {
  float *most = z.most + group * W, *sum = z.sum + group * W;
  Vec old = load(most), m = largest(s, n, factor, old), total{};
  for (int t = 0, step = 0; t < n; t += kPairs, ++step)
    total += weights(s + t * W, least(kPairs, n - t), factor, m, z.pairs,
                     z.weights + group * kWeightWords + step * 2 * kWords);
  Vec a = exp2_of_nonpositive(old - m);
  store(z.alpha + group * W, a);
  store(most, m);
  store(sum, load(sum) * a + total);
}

// S and P of all groups.
inline void weigh(const Problem& a, const Task& task, const Memory& z, const Tile<bf16>& tile, Ahead& ahead) {
  const int rows = task.row1 - task.row0, groups = groups_of(rows), n = tile.n;
  Block block[kBlocks];
  for (int i = 0; i < kBlocks; ++i)
    block[i] = i * kSide < n ? block_of(a, tile, i * kSide, z.copies + size_t(i) * kSide * a.dim()) : block[i - 1];
  const int lines = (20 + groups - 1) / groups;  // a third of the next tile; the rest while P V is computed
  const bool masked = tile.start + n > open_end(a, task.sequence);
  for (int g = 0, step; g < groups; g += step) {
    step = groups - g >= 2 ? 2 : 1;
    const uint32_t* q = z.queries + size_t(g) * a.dim() / kPairs * kWords;
    if (step == 1) {
      scores<1>(a, block, q, z.scores, lines, ahead);
    } else {
      for (int t = 0; t < n; t += 2 * kSide) scores<2>(a, block + t / kSide, q, z.scores + t * W, lines, ahead);
    }
    for (int i = g; i < g + step; ++i) {
      float* s = z.scores + (i - g) * kTile * W;
      float factor = a.scale * kLog2E;
      if (masked) {  // minus infinity must meet no factor
        for (int t = 0; t < n; ++t) store(s + t * W, load(s + t * W) * factor);
        mask(a, task.sequence, task.row0 + i * W, least(W, rows - i * W), tile.start, n, s);
        factor = 1;
      }
      softmax(s, n, factor, i, z);
    }
  }
}

// Packs 64 dims of V, a few pairs of tokens at a time, between the multiplications with the dims before.
struct Packer {
  const bf16* const* token;
  int dim, pair, pairs;
  uint32_t* to;
  Ahead ahead;

  MLA_INLINE void step(int count) {
    for (; count && pair < pairs; --count, ++pair) {
      for (int i = 0; i < 4 && ahead.any(); ++i) ahead.step();
      const unsigned row = pair;
      uint32_t* at = to + row / kSide * 4 * kWords + row % kSide * kSide;
      const bf16 *one = token[2 * row] + dim, *other = token[2 * row + 1] + dim;
      MLA_UNROLL(2)
      for (int half = 0; half < 2; ++half, at += 2 * kWords, one += kPairs, other += kPairs) {
        Bits x = *reinterpret_cast<const BitsLoose*>(one), y = *reinterpret_cast<const BitsLoose*>(other);
        *reinterpret_cast<BitsLoose*>(at) = (x & 0xffffu) | (y << 16);  // even dims
        *reinterpret_cast<BitsLoose*>(at + kWords) = paired(x, y);      // odd dims
      }
    }
  }
};

// Two registers of O += P V for two of the four registers of V: hi, hi, lo, lo.
template <int O>
MLA_INLINE void add_values(const uint32_t* v) {
  amx_load<6>(v, kRowBytes);
  amx_load<7>(v + kWords, kRowBytes);
  amx_multiply<O, 4, 6>();
  amx_multiply<O + 1, 4, 7>();
  amx_multiply<O, 5, 6>();
  amx_multiply<O + 1, 5, 7>();
}

inline void load_o(const float* o, bool first) {
  if (first) {
    amx_zero<0>();
    amx_zero<1>();
    amx_zero<2>();
    amx_zero<3>();
  } else {
    amx_load<0>(o, kRowBytes);
    amx_load<1>(o + kWords, kRowBytes);
    amx_load<2>(o + 2 * kWords, kRowBytes);
    amx_load<3>(o + 3 * kWords, kRowBytes);
  }
}

// 64 dims of O for one group.
inline void values(const uint32_t* p, int steps, const uint32_t* v, float* o, bool first, int count, Packer& next) {
  Packer packer = next;
  load_o(o, first);
  for (int step = 0; step < steps; ++step, p += 2 * kWords, v += 4 * kWords) {
    amx_load<4>(p, kRowBytes);
    amx_load<5>(p + kWords, kRowBytes);
    add_values<0>(v);
    packer.step(count);
    add_values<2>(v + 2 * kWords);
    packer.step(count);
  }
  amx_store<0>(o, kRowBytes);
  amx_store<1>(o + kWords, kRowBytes);
  amx_store<2>(o + 2 * kWords, kRowBytes);
  amx_store<3>(o + 3 * kWords, kRowBytes);
  next = packer;
}

// O * alpha for one group, or nothing where no row has a new maximum: by far most tiles of a long context.
inline void rescale(const float* alpha, float* o, int rank) {
  bool changed = false;
  for (int r = 0; r < W; ++r) changed |= alpha[r] != 1;
  for (int i = 0; i < rank / W && changed; ++i)
    for (int r = 0; r < W; ++r, o += W) store(o, load(o) * alpha[r]);
}

// O = O * alpha + P V for all groups, 64 dims after the other.
inline void add_tile(const Problem& a, const Task& task, const Memory& z, const Tile<bf16>& tile, const Ahead& ahead) {
  const int groups = groups_of(task.row1 - task.row0), steps = (tile.n + kPairs - 1) / kPairs;
  const bool first = tile.start == task.token0;
  const size_t group = size_t(a.rank) * W;
  const bf16* token[kTile];  // those past the end are zero: nothing times NaN must not happen
  for (int t = 0; t < kTile; ++t) token[t] = t < tile.n ? tile.latent[t] : z.zeros;
  const int pairs = steps * kSide, count = (pairs / (2 * steps) + groups - 1) / groups;
  Packer packer{token, 0, 0, pairs, z.values, ahead};
  packer.step(pairs);
  for (int g = 0; g < groups && !first; ++g) rescale(z.alpha + g * W, z.o + g * group, a.rank);
  for (int dim = 0, half = 0; dim < a.rank; dim += kValueDims, half ^= 1) {
    packer.dim = dim + kValueDims;
    packer.pair = packer.dim < a.rank ? 0 : pairs;
    packer.to = z.values + (half ^ 1) * kValueWords;
    for (int g = 0; g < groups; ++g)
      values(z.weights + g * kWeightWords, steps, z.values + half * kValueWords, z.o + g * group + dim * W, first,
             count, packer);
  }
}

inline void attend(const Problem& a, const Task& task, const Memory& z) {
  Tile<bf16> tiles[2];
  Tile<bf16>*tile = tiles, *next = tiles + 1;
  locate(a, task.sequence, task.token0, least(kTile, task.token1 - task.token0), *tile);
  for (int start = task.token0; start < task.token1; start += kTile) {
    const int coming = least(kTile, task.token1 - start - kTile);
    next->runs[0] = {nullptr, nullptr};
    if (coming > 0) locate(a, task.sequence, start + kTile, coming, *next);
    Ahead ahead(next->runs);
    weigh(a, task, z, *tile, ahead);
    add_tile(a, task, z, *tile, ahead);
    Tile<bf16>* done = tile;
    tile = next;
    next = done;
  }
}

// A row of O in the order of widen().
inline void gather_row(const Problem& a, const Memory& z, int row, float* to) {
  const float* from = z.o + (size_t(row / W) * a.rank + row % W) * W;
  for (int d = 0; d < a.rank; d += W, from += kWords) store(to + d, load(from));
}

void run(const Problem& a, const Task& task, void* memory) {
  if (a.dtype != Dtype::bf16) return MLA_BASE::kernel.run(a, task, memory);
  const int rows = task.row1 - task.row0;
  const Memory z(a, rows, memory);
  for (int r = 0; r < padded(rows); ++r) {
    z.most[r] = kNothing;
    z.sum[r] = 0;
  }
  __builtin_memset(z.zeros, 0, sizeof(bf16) * a.rank);
  if (task.token1 > task.token0) {
    pack_queries(a, task, z);
    amx_begin();
    attend(a, task, z);
    amx_end();
    for (int r = 0; r < rows && task.out; ++r) gather_row(a, z, r, task.out + size_t(r) * a.rank);
  }
  finish<bf16>(a, task, z.most, z.sum, [&](int r) {
    gather_row(a, z, r, z.row);
    return z.row;
  });
}

void merge(const Problem& a, const Partials& parts, int row) {
  if (a.dtype != Dtype::bf16) return MLA_BASE::kernel.merge(a, parts, row);
  merge_typed<bf16>(a, parts, row);
}

size_t scratch_bytes(const Problem& a, int rows) {
  return a.dtype == Dtype::bf16 ? Memory(a, rows, nullptr).bytes : MLA_BASE::kernel.scratch_bytes(a, rows);
}

}  // namespace

extern const Kernel kernel;
// Zero rows fill up a group: 1 head x 32K took 4.7 ms here and 2.9 with AVX-512 (Emerald Rapids, 2026-11-29).
const Kernel kernel = {"amx", W, 6, scratch_bytes, run, merge};

}  // namespace mla::MLA_ISA
