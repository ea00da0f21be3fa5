#include "schedule.h"

#include <algorithm>

namespace mla {
namespace {

constexpr int kMostRows = 128, kLeastRows = 16;

int ceil_div(int64_t a, int64_t b) { return int((a + b - 1) / b); }

int context_of(const Problem& a, int sequence) { return std::max(0, a.lengths[sequence] - a.starts[sequence]); }

}  // namespace

int default_tile(int rows, int units, int threads) {
  int tiles = ceil_div(rows, kMostRows);
  if (rows >= 2 * kLeastRows && units * tiles < threads)
    tiles = std::clamp(ceil_div(threads, units), tiles, rows / kLeastRows);
  return std::min(rows, ceil_div(ceil_div(rows, tiles), kLeastRows) * kLeastRows);
}

Schedule make_schedule(const Problem& a, const Request& request, int threads) {
  int longest = 0;
  for (int b = 0; b < a.batch; ++b) longest = std::max(longest, context_of(a, b));
  const int piece = std::max(1, ceil_div(ceil_div(longest, request.partitions), kTile)) * kTile;
  auto pieces_of = [&](int sequence) { return std::max(1, ceil_div(context_of(a, sequence), piece)); };

  Schedule s;
  s.partitions = std::max(1, ceil_div(longest, piece));
  int units = 0;
  for (int b = 0; b < a.batch; ++b) units += pieces_of(b);
  const int rows = a.rows();
  s.tile = request.tile > 0 ? std::min(request.tile, rows) : default_tile(rows, units, threads);
  s.tasks.reserve(size_t(units) * ceil_div(rows, s.tile));
  for (int b = 0; b < a.batch; ++b) {
    const int pieces = pieces_of(b), end = a.starts[b] + context_of(a, b);
    for (int p = 0; p < pieces; ++p)
      for (int row = 0; row < rows; row += s.tile) {
        const int token0 = a.starts[b] + p * piece, token1 = int(std::min(int64_t(token0) + piece, int64_t(end)));
        s.tasks.push_back({b, row, std::min(row + s.tile, rows), token0, token1, nullptr, nullptr, nullptr});
      }
    if (pieces == 1) continue;
    s.split.push_back({b, pieces, nullptr, nullptr, nullptr});
    s.partial_floats += size_t(pieces) * rows * (a.rank + 2);
  }
  return s;
}

void place_partials(const Problem& a, Schedule& s, float* memory) {
  const size_t rows = a.rows();
  auto task = s.tasks.begin();
  for (Partials& parts : s.split) {
    const size_t all = parts.pieces * rows;
    parts.out = memory;
    parts.most = parts.out + all * a.rank;
    parts.sum = parts.most + all;
    memory = parts.sum + all;
    while (task->sequence != parts.sequence) ++task;
    for (size_t at = 0; at < all; at += task->row1 - task->row0, ++task) {
      task->out = parts.out + at * a.rank;
      task->most = parts.most + at;
      task->sum = parts.sum + at;
    }
  }
}

}  // namespace mla
