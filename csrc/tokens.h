// Where the tokens of a tile lie in the cache, and the prefetch of the next tile.
#pragma once
#include "lanes.h"

namespace mla::MLA_ISA {
namespace {

constexpr int kBeyond = 16;  // tokens after a tile that one_row.h looks at, 12, as whole blocks

struct Run {
  const char *at, *end;
};

// Tokens at one distance from each other.
template <typename T>
struct Span {
  const T* at;
  int count;
};

// Latents in the order of tokens; numbers apart in elements.
template <typename T>
struct Spans {
  int64_t stride;
  int count;
  Span<T> span[(kTile + kBeyond) / 8 + 1];  // pages hold 8 tokens or more
};

template <typename T>
MLA_INLINE Spans<T> one_span(const T* at, int count, int64_t stride) {
  Spans<T> spans;  // the other entries stay as they are: this runs once a tile and group
  spans.stride = stride;
  spans.count = 1;
  spans.span[0] = {at, count};
  return spans;
}

// Tokens one by one; entries past the last token repeat it up to a multiple of kBlock: blocks of tokens are read whole.
template <typename T>
struct Tile {
  int start, n;  // tokens [start, start + n) of the sequence, n <= kTile + kBeyond
  const T *latent[kTile + kBeyond], *rope[kTile + kBeyond];
  Spans<T> values;
  Run runs[2 * (kTile + kBeyond) + 1];  // the same bytes as stretches of memory, ended by a null
  int run_count;

  void add_run(const T* at, int64_t width, int64_t stride, int count) {
    if (stride == width) width *= count, count = 1;
    for (int i = 0; i < count; ++i, at += stride)
      runs[run_count++] = {reinterpret_cast<const char*>(at), reinterpret_cast<const char*>(at + width)};
  }
};

template <typename T>
void locate(const Problem& a, int sequence, int start, int n, Tile<T>& tile) {
  const Cache& c = a.cache;
  tile.start = start;
  tile.n = n;
  tile.run_count = 0;
  tile.values.count = 0;
  tile.values.stride = c.latent_token;
  for (int t = 0, count; t < n; t += count) {
    int64_t outer = sequence;
    int slot = start + t;
    count = n - t;
    if (c.table) {
      outer = c.table[sequence * c.table_row + slot / c.block_size * c.table_column];
      slot %= c.block_size;
      count = least(count, c.block_size - slot);
    }
    const T* latent = static_cast<const T*>(c.latent) + outer * c.latent_outer + slot * c.latent_token;
    const T* rope = static_cast<const T*>(c.rope) + outer * c.rope_outer + slot * c.rope_token;
    tile.values.span[tile.values.count++] = {latent, count};
    for (int i = 0; i < count; ++i) {
      tile.latent[t + i] = latent + i * c.latent_token;
      tile.rope[t + i] = rope + i * c.rope_token;
    }
    tile.add_run(latent, c.table ? a.dim() : a.rank, c.latent_token, count);
    if (!c.table && a.rope) tile.add_run(rope, a.rope, c.rope_token, count);
  }
  tile.runs[tile.run_count] = {nullptr, nullptr};
  for (int t = n; t % kBlock; ++t) {
    tile.latent[t] = tile.latent[n - 1];
    tile.rope[t] = tile.rope[n - 1];
  }
}

// Asks for the next tile's cache lines, a few at a time, so that memory works while the arithmetic does.
// Into L2: 1.1-1.7x on Emerald Rapids, 2026-11-29; a tile early into L1 was up to 12 % slower.
struct Ahead {
  const Run* run;
  const char *at, *end;
  explicit Ahead(const Run* first) : run(first), at(first->at), end(first->end) {}
  MLA_INLINE bool any() const { return at; }
  MLA_INLINE void step() {
    __builtin_prefetch(at, 0, 2);
    at += 64;
    if (at >= end) {
      ++run;
      at = run->at;
      end = run->end;
    }
  }
};

}  // namespace
}  // namespace mla::MLA_ISA
