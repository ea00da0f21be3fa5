// Shared by all kernels; included first. The back end defines before it: RANK, ROPE, PAGED, ROWS,
// BITS (type of a number as it lies in memory) and, for 16-bit numbers, HALF ("bf16" or "f16").
#define MLA __device__ __forceinline__
#define MLA_RARE static __device__ __noinline__ void  // out of the way: code, too, is read from memory
namespace mla {
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef BITS Bits;

// Queries of this block's sequence; strides in elements.
struct Query {
  const Bits *nope, *pe;
  i64 nope_head, nope_query, nope_dim, pe_head, pe_query, pe_dim;
};

// Dense: the sequence's first token. Paged: block 0, and the sequence's row of the block table.
struct Cache {
  const Bits *latent, *pe;
  i64 block, token, dim, pe_token, pe_dim;  // strides in elements
  const int* table;
  i64 table_column;
};

// What this block attends, and for whom. Tokens count from the first one of the sequence.
struct Work {
  int sequence, piece, pieces;  // which piece, of how many that results have room for
  int begin, end;               // tokens of the piece
  int start, tokens;            // of the sequence: its first slot of a dense cache, and how many
  int first, rows, q_len;       // row = head * q_len + query; query i sees q_len - 1 - i tokens fewer
  int block_size, blocks;
  float scale;  // includes log2(e)
};

MLA int listed_piece() { return blockIdx.y * gridDim.z + blockIdx.z; }

// `numbers`: of the call, see `_info` in backends/cuda.py. Where all sequences are alike they tell
// everything, for the first read of memory takes most of a microsecond. Else each block looks up its
// piece in `info`.
template <typename Numbers>
MLA Work work(const int* info, const Numbers& numbers) {
  Work w;
  w.sequence = blockIdx.y;
  w.piece = blockIdx.z;
  w.scale = __int_as_float(numbers[1]);
  w.rows = numbers[2];
  w.q_len = numbers[3];
  w.block_size = numbers[4];
  w.blocks = numbers[5];
  w.pieces = numbers[6];
  w.start = numbers[7];
  w.tokens = numbers[8];
  if (numbers[9] > 0) {
    const int4 mine = ((const int4*)info)[listed_piece()];
    w.sequence = mine.x;
    w.piece = mine.y;
    w.start = mine.z;
    w.tokens = mine.w;
  }
  w.begin = w.piece * (int)numbers[0];
  w.end = min(w.begin + (int)numbers[0], w.tokens);
  w.first = blockIdx.x * ROWS;
  return w;
}

// One past the last token of the piece that a row sees.
MLA int row_end(const Work& w, int row) { return min(w.end, w.tokens - w.q_len + 1 + row % w.q_len); }

// Which block of a sequence a token is in. A division takes long, and most sizes are powers of two.
MLA int block_of(const Work& w, int token) {
  const bool power = (w.block_size & w.block_size - 1) == 0;
  return power ? token >> 31 - __clz(w.block_size) : token / w.block_size;
}
// The block of the cache that holds a token, as the table has it; 0 where there is no token.
MLA int block_id(const Cache& c, const Work& w, int token) {
  return PAGED && token < w.end ? c.table[block_of(w, token) * c.table_column] : 0;
}
// The same, but an id of no block is not followed.
MLA int known_block(const Work& w, int id, int* unknown) {
  if ((u32)id < (u32)w.blocks) return id;
  *unknown = 1;
  return 0;
}

struct Slot {
  const Bits *latent, *pe;
};
MLA Slot slot(const Cache& c, const Work& w, int block, int token) {
  const i64 inside = PAGED ? token - block_of(w, token) * w.block_size : token, at = block * c.block;
  Slot s;
  s.latent = c.latent + at + inside * c.token;
  s.pe = c.pe + at + inside * c.pe_token;
  return s;
}

// Where the results go: rows of this piece. `alone`: one piece, so they are final and of the
// caller's dtype. Else they are floats, not yet divided by the sum of the weights, and the merge
// reads none of a row that saw no token. A sequence's pieces lie together, then all their sums.
struct Result {
  Bits* out;  // [rows, RANK]
  // Alone: LSE [rows]. Else largest score and sum of the weights [rows, pieces], of this piece.
  float* sums;
  int pieces;
  bool alone;
};
struct Outputs {
  Bits* out;
  float* lse;
};
MLA Result result(const Outputs& to, const Work& w) {
  Result r;
  r.alone = w.pieces == 1;
  r.pieces = w.pieces;
  if (r.alone) {
    const int row = w.sequence * w.rows;  // 2^31 rows would take 2 TB and more
    r.out = to.out + (i64)row * RANK;
    r.sums = to.lse + row;
  } else {
    const int each = w.pieces * w.rows;
    float* part = (float*)to.out + (i64)w.sequence * each * (RANK + 4);  // + 2 would do, but for sixteens of bytes
    r.out = (Bits*)(part + w.piece * w.rows * RANK);
    r.sums = part + each * RANK + 2 * w.piece;
  }
  return r;
}

MLA float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA float minus_infinity() { return __int_as_float(0xff800000); }
MLA float not_a_number() { return __int_as_float(0x7fffffff); }

// What a row's sums end as. `top`: the largest score, times log2(e); `sum`: of the weights.
MLA float final_sum(float sum, bool unknown) { return unknown ? not_a_number() : sum; }
MLA float inverse(float sum) { return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum); }
MLA float log_sum(float top, float sum) {
  return sum == 0.0f ? minus_infinity() : (top + log2f(sum)) * 0.69314718055994531f;
}
MLA void write_sums(const Result& r, int row, float top, float sum) {
  if (r.alone)
    r.sums[row] = log_sum(top, sum);
  else
    ((float2*)r.sums)[row * r.pieces] = make_float2(top, sum);
}
}  // namespace mla
