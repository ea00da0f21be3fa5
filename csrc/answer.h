// What every kernel does alike: masks, the answer of a task, and the merge of partial answers. Accumulators of halves
// keep the order of widen(): narrow() undoes it.
#pragma once
#include "tokens.h"

namespace mla::MLA_ISA {
namespace {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

inline int padded(int rows) { return (rows + W - 1) / W * W; }
inline int groups_of(int rows) { return (rows + W - 1) / W; }

// The end of what a sequence's first query token sees.
inline int open_end(const Problem& a, int sequence) { return a.lengths[sequence] - a.q_len + 1; }

// Causal among the query tokens of a sequence; rows [row, row + rows) of tokens [start, start + n).
inline void mask(const Problem& a, int sequence, int row, int rows, int start, int n, float* s) {
  const int open = open_end(a, sequence);
  if (start + n <= open) return;
  for (int r = 0; r < rows; ++r) {
    const int limit = open + (row + r) % a.q_len;
    for (int t = limit > start ? limit - start : 0; t < n; ++t) s[t * W + r] = -__builtin_inff();
  }
}

template <typename T>
const T* query_row(const Problem& a, const void* base, const int64_t* strides, int sequence, int row) {
  return static_cast<const T*>(base) + sequence * strides[0] + row / a.q_len * strides[1] + row % a.q_len * strides[2];
}

template <typename T>
inline void write_row(const float* o, float factor, T* out, int rank) {
  for (int d = 0; d < rank; d += 2 * W) narrow(out + d, Two{load(o + d) * factor, load(o + d + W) * factor});
}

// A row without a single token is exactly zero, whatever `o` holds.
template <typename T>
inline void write_nothing(T* out, int rank) {
  for (int d = 0; d < rank; d += 2 * W) narrow(out + d, Two{});
}

inline float lse_of(float most, float sum) {
  return sum == 0 ? -__builtin_inff() : (most + __builtin_log2f(sum)) * kLn2;
}

// A task's answer, or the numbers that its partial answer needs beside O. `o_of(row)` is a row of O.
template <typename T, typename Rows>
void finish(const Problem& a, const Task& task, const float* most, const float* sum, const Rows& o_of) {
  for (int r = 0; r < task.row1 - task.row0; ++r) {
    if (task.out) {
      task.most[r] = most[r];
      task.sum[r] = sum[r];
      continue;
    }
    const size_t at = size_t(task.sequence) * a.rows() + task.row0 + r;
    T* out = static_cast<T*>(a.out) + at * a.rank;
    if (sum[r] == 0) {
      write_nothing(out, a.rank);
    } else {
      write_row(o_of(r), 1 / sum[r], out, a.rank);
    }
    if (a.lse) a.lse[at] = lse_of(most[r], sum[r]);
  }
}

template <typename T>
void merge_typed(const Problem& a, const Partials& parts, int row) {
  const int rows = a.rows();
  const float* from[kMostPartitions];
  float weight[kMostPartitions], most = kNothing, sum = 0;
  int used = 0;
  for (int p = 0; p < parts.pieces; ++p)
    if (parts.sum[p * rows + row] != 0 && parts.most[p * rows + row] > most) most = parts.most[p * rows + row];
  for (int p = 0; p < parts.pieces; ++p) {
    const size_t at = size_t(p) * rows + row;
    if (parts.sum[at] == 0) continue;
    weight[used] = __builtin_exp2f(parts.most[at] - most);
    sum += weight[used] * parts.sum[at];
    from[used++] = parts.out + at * a.rank;
  }
  const size_t at = size_t(parts.sequence) * rows + row;
  T* out = static_cast<T*>(a.out) + at * a.rank;
  if (a.lse) a.lse[at] = lse_of(most, sum);
  if (sum == 0) return write_nothing(out, a.rank);
  const float inverse = 1 / sum;
  for (int d = 0; d < a.rank; d += 2 * W) {
    Two mix{};
    for (int p = 0; p < used; ++p) {
      mix.x += load(from[p] + d) * weight[p];
      mix.y += load(from[p] + d + W) * weight[p];
    }
    narrow(out + d, Two{mix.x * inverse, mix.y * inverse});
  }
}

}  // namespace
}  // namespace mla::MLA_ISA
