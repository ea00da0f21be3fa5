// Shared by the decode kernels: stands in front of matrix.metal or vector.metal.
//
// Row r of a sequence is query r % q_len of head r / q_len. Query i of q_len sees all tokens but
// the last q_len - 1 - i. A sequence's tokens are [start, length), cut in pieces of equal length.
#define UNROLL _Pragma("clang loop unroll(full)")

struct Span {       // what a threadgroup attends, and for whom
  int begin, end;   // tokens of its piece
  int length;       // one past the sequence's last token
  int first_row;    // of its tile
  int rows, q_len;  // of the sequence
  bool alone;       // its piece is the only one: the result is final
  float scale;      // from a dot product to a score in log2 units
};

// `group` is (row tile, sequence, piece). Short inputs arrive in constant memory: hence the types.
template <typename Lengths, typename Starts>
METAL_FUNC Span span_of(uint3 group, uint pieces, int tile_rows, const constant int* q_shape,
                        Lengths lengths, Starts starts, int piece, float scale) {
  Span span;
  span.begin = starts[group.y] + int(group.z) * piece;
  span.length = lengths[group.y];
  span.end = min(span.begin + piece, span.length);
  span.first_row = int(group.x) * tile_rows;
  span.q_len = q_shape[2];
  span.rows = q_shape[1] * span.q_len;
  span.alone = pieces == 1;
  span.scale = scale * M_LOG2E_F;
  return span;
}

// One past the last token that a row sees, within the piece.
METAL_FUNC int row_end(Span span, int row) {
  return min(span.end, span.length - span.q_len + 1 + row % span.q_len);
}

// Where a row's query begins: [batch, heads, q_len, ...] by strides, from its sequence on.
METAL_FUNC long query_offset(Span span, int row, const constant int64_t* strides) {
  const int head = row / span.q_len, query = row - head * span.q_len;
  return head * strides[1] + query * strides[2];
}

template <typename T>
struct Cache {                      // of one sequence; a dense one is a single endless block
  const device T* latent;           // of block 0
  const device T* pe;
  long latent_block, latent_token;  // strides in elements; caches may exceed 2^31 of them
  long pe_block, pe_token;
  int blocks, block_size;           // no id at or above `blocks` is followed
  long column;                      // stride of the block table's columns, set by the body
};

// From block 0; in 64 bits, like the strides.
template <typename T>
METAL_FUNC long latent_offset(Cache<T> cache, int block, int token) {
  return block * cache.latent_block + token * cache.latent_token;
}
template <typename T>
METAL_FUNC long pe_offset(Cache<T> cache, int block, int token) {
  return block * cache.pe_block + token * cache.pe_token;
}

// Whether lanes may load `step` elements of a token at once. A single slice has any stride.
template <int TOKEN, typename T>  // TOKEN: dimension of tokens
METAL_FUNC bool in_steps(const device T* memory, const constant int* shape,
                         const constant int64_t* strides, int step) {
  return ulong(memory) % (step * sizeof(T)) == 0 && strides[TOKEN + 1] == 1 &&
         (shape[0] == 1 || strides[0] % step == 0) &&
         (shape[TOKEN] == 1 || strides[TOKEN] % step == 0);
}

// paged: latent [blocks, block_size, rank + rope], and k_pe is the same array.
// dense: latent [batch, 1, tokens, rank], k_pe [batch, 1, tokens, rope].
template <bool PAGED, typename T>
METAL_FUNC Cache<T> cache_of(int sequence, int rank, const device T* latent,
                             const constant int* shape, const constant int64_t* strides,
                             const device T* k_pe, const constant int64_t* pe_strides) {
  constexpr int TOKEN = PAGED ? 1 : 2;
  Cache<T> cache;
  cache.latent_block = strides[0];
  cache.latent_token = strides[TOKEN];
  cache.pe_block = pe_strides[0];
  cache.pe_token = pe_strides[TOKEN];
  cache.latent = latent + (PAGED ? 0 : sequence * strides[0]);
  cache.pe = k_pe + (PAGED ? rank : sequence * pe_strides[0]);
  cache.block_size = PAGED ? shape[1] : 0x7fffffff;
  // Lanes load 16 bytes of a token at once, and 2 rope numbers: what lies otherwise isn't read.
  const bool readable = in_steps<TOKEN>(latent, shape, strides, 16 / sizeof(T)) &&
                        in_steps<TOKEN>(k_pe, shape, pe_strides, 2);
  cache.blocks = readable ? (PAGED ? shape[0] : 1) : 0;
  return cache;
}

// One lane reads for all: the tokens that a simdgroup takes at once lie in one block.
template <bool PAGED, typename Table>
METAL_FUNC int block_id(Table table, long column, int block, ushort lane) {
  int id = 0;
  if (PAGED && lane == 0) {
    id = table[block * column];
  }
  return PAGED ? simd_broadcast_first(id) : 0;
}

struct Walk {  // where a simdgroup stands in its sequence
  int token;
  int block, inside;  // column of the table, token of the block
};
METAL_FUNC Walk walk_from(int token, int block_size) {
  Walk w;
  w.token = token;
  w.block = token / block_size;
  w.inside = token - w.block * block_size;
  return w;
}
METAL_FUNC void walk(thread Walk& w, int tokens, int block_size) {
  w.token += tokens;
  w.inside += tokens;
  while (w.inside >= block_size) {  // no division: at most tokens / 8 rounds
    w.inside -= block_size;
    w.block++;
  }
}

// Where a threadgroup's numbers begin in an output [batch, pieces, rows, width].
template <typename Out>
METAL_FUNC device Out* own_rows(device Out* out, uint3 group, uint pieces, int rows, int width) {
  return out + (long(group.y) * pieces + group.z) * rows * width;
}

// A piece without tokens. No one reads the output of a piece whose LSE is -inf.
template <typename Out>
METAL_FUNC void nothing(Span span, int tile_rows, int rank, int thread_index, int threads,
                        device Out* out, device float* lse) {
  const int end = min(span.first_row + tile_rows, span.rows);
  for (int row = span.first_row + thread_index; row < end; row += threads) {
    lse[row] = -INFINITY;
  }
  if (span.alone) {
    for (int i = span.first_row * rank + thread_index; i < end * rank; i += threads) {
      out[i] = Out(0.0f);
    }
  }
}

// Natural LSE of a row whose weights 2^(score - largest) add up to `sum`: 0 where it saw no token,
// NaN where it met a block that doesn't exist.
METAL_FUNC float natural_lse(float largest, float sum) {
  return sum == 0.0f ? -INFINITY : (largest + log2(sum)) * M_LN2_F;
}
