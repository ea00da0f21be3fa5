// What the scheduler (cpu_decode.cpp) and the kernels (kernel_*.cpp) share. C headers only: kernel_*.cpp are compiled
// for newer CPUs, and an inline function from std:: compiled there could be the copy that the linker keeps for
// everybody.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Never emitted as a function of its own.
#define MLA_INLINE inline __attribute__((always_inline))

namespace mla {

constexpr int kTile = 64;  // tokens of one softmax step, of few rows fewer; pieces of a context are multiples of it
constexpr int kMostPartitions = 256;
constexpr float kNothing = -3.40282347e38f;  // the running maximum before the first token

enum class Dtype { f32, f16, bf16 };

// Numbers of a row are dense; the other strides are in elements.
struct Query {
  const void *nope, *rope;  // [batch, heads, q_len, rank] and [..., rope]; rope is null for geometries without
  int64_t nope_strides[3], rope_strides[3];
};

// Token t of sequence b: paged, slot t % block_size of block table[b][t / block_size]; dense, slot t of sequence b.
struct Cache {
  const void *latent, *rope;  // slot s of block (or sequence) i: latent + i * latent_outer + s * latent_token
  int64_t latent_outer, latent_token, rope_outer, rope_token;
  const int32_t* table;  // [batch, pages a sequence]; null: dense
  int64_t table_row, table_column;
  int blocks, block_size;  // paged only
};

struct Problem {
  int batch, heads, q_len, rank, rope;  // rank 512 or 256, rope 0, 32 or 64
  Dtype dtype;
  float scale;
  Query query;
  Cache cache;
  const int *lengths, *starts;  // [batch]: tokens [start, length) are attended by the last query token
  void* out;                    // [batch, heads, q_len, rank]
  float* lse;                   // [batch, heads, q_len], natural log; null: not wanted
  MLA_INLINE int rows() const { return heads * q_len; }
  MLA_INLINE int dim() const { return rank + rope; }
};

// Some rows (head * q_len + query token) of one sequence against one piece of its context.
struct Task {
  int sequence, row0, row1, token0, token1;
  float* out;         // [row1 - row0, rank] not yet divided by sum; null: write the answer itself
  float *most, *sum;  // [row1 - row0] running maximum (log2 units) and sum
};

// The partial answers of one sequence.
struct Partials {
  int sequence, pieces;
  float* out;         // [pieces, rows, rank]
  float *most, *sum;  // [pieces, rows]
};

struct Kernel {
  const char* name;
  int lanes;       // rows come in groups of so many
  int least_rows;  // with fewer, for bf16, the next best kernel is faster
  size_t (*scratch_bytes)(const Problem&, int rows);
  void (*run)(const Problem&, const Task&, void* scratch);
  void (*merge)(const Problem&, const Partials&, int row);
};

}  // namespace mla
