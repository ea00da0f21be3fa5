// Each simdgroup owns RANK / SIMDS latent dimensions and ROPE / SIMDS rope dimensions of all tokens
// and rows. It loads them once, straight into 8x8 matrices, and uses the same registers twice: as K
// in S^T = K Q^T (the simdgroups' shares of the sums meet in threadgroup memory) and as V in
// O = P V (its columns of O).
//
// Which dimension stands in which matrix column is free as long as K, Q and O agree, so each lane
// loads V elements, 16 bytes, at once: columns 2 * pair and the next of matrix i are dimensions
// i / (V / 2) * 4 V + pair * V + i % (V / 2) * 2 and the next.

// An 8x8 matrix: a lane holds row `fragment_row`, columns 2 * fragment_pair and the next. Apple
// doesn't document this map; MLX's own kernels rest on it, and lanes.body.metal shows it on a
// device.
METAL_FUNC short fragment_row(ushort lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }
METAL_FUNC short fragment_pair(ushort lane) { return (lane >> 2 & 2) | (lane & 1); }

// How softmax weights are stored in threadgroup memory, and multiplied. bfloat would round them as
// coarsely as it rounds the output, and the two together exceed our bound. They are 2^EXPONENT
// times too large, so that the many small ones of a long context, which half can't hold, count.
template <typename M>
struct Weight {
  typedef half Stored;
  typedef half Used;
  enum : int { EXPONENT = 15 };
};
template <>
struct Weight<bfloat> {
  typedef half Stored;
  typedef float Used;
  enum : int { EXPONENT = 15 };
};
template <>
struct Weight<float> {
  typedef float Stored;
  typedef float Used;
  enum : int { EXPONENT = 0 };
};

template <typename T_, typename M_, int RANK_, int ROPE_, int SIMDS_, int ROW_BLOCKS_,
          int TOKEN_BLOCKS_>
struct Tile {  // what follows from the template arguments
  typedef T_ T;  // of the cache
  typedef M_ M;  // of the products' operands
  typedef typename Weight<M>::Stored P;
  enum : int {
    RANK = RANK_,
    SIMDS = SIMDS_,
    ROW_BLOCKS = ROW_BLOCKS_,
    TOKEN_BLOCKS = TOKEN_BLOCKS_,
    ROWS = 8 * ROW_BLOCKS_,
    STEP = 8 * TOKEN_BLOCKS_,
    V = 16 / sizeof(T_),
    SLICE = RANK_ / SIMDS_,  // latent dimensions of a simdgroup
    ROPE_SLICE = ROPE_ / SIMDS_,
    RANK_TILES = RANK_ / SIMDS_ / 8,
    ROPE_TILES = ROPE_ / SIMDS_ / 8,
    TILES = RANK_ / SIMDS_ / 8 + ROPE_ / SIMDS_ / 8,
    // Rows in threadgroup memory are padded against bank conflicts.
    STRIDE = 8 * TOKEN_BLOCKS_ + 4,                 // of scores
    P_STRIDE = 8 * TOKEN_BLOCKS_ + 16 / sizeof(P),  // of weights
    // Softmax: a lane takes one token of one row, a simdgroup TOGETHER rows that lie APART.
    TOGETHER = 4 / TOKEN_BLOCKS_,
    APART = 2 * TOKEN_BLOCKS_,
    PARTS = 2 * ROW_BLOCKS_ * TOKEN_BLOCKS_,  // ROWS / TOGETHER
    PASSES = (2 * ROW_BLOCKS_ * TOKEN_BLOCKS_ + SIMDS_ - 1) / SIMDS_
  };
  static_assert(STEP == 8 || STEP == 16 || STEP == 32, "a simdgroup holds whole rows of scores");
  static_assert(SLICE % (4 * V) == 0 && SLICE * SIMDS == RANK, "even shares of the latent");
  static_assert(ROPE_TILES * 8 * SIMDS == ROPE_, "even shares of the rope part");
};

template <typename Tile>
struct Shared {  // threadgroup memory
  threadgroup float* score;         // [SIMDS, ROWS, STRIDE]: shares of the dot products
  threadgroup typename Tile::P* p;  // [ROWS, P_STRIDE]: softmax weights
  threadgroup float* rescale;       // [ROWS]: what earlier sums are worth now
  threadgroup float* inverse;       // [ROWS]: 1 / sum of weights
};

template <typename Tile>
struct Running {  // of the rows whose softmax a lane takes part in
  float largest[Tile::PASSES];  // score so far
  float weight[Tile::PASSES];   // sum of the weights of the lane's own tokens
  int limit[Tile::PASSES];      // tokens from here on are masked
};

METAL_FUNC half2 two_of(uint4 raw, int i, half) { return as_type<half2>(raw[i]); }
METAL_FUNC bfloat2 two_of(uint4 raw, int i, bfloat) { return as_type<bfloat2>(raw[i]); }
METAL_FUNC float2 two_of(uint4 raw, int i, float) {
  float2 two;
  two[0] = as_type<float>(raw[2 * i]);
  two[1] = as_type<float>(raw[2 * i + 1]);
  return two;
}

// Q^T: the matrix row is the dimension, the column a row of ours. Rows past the last are zeros.
template <typename Tile, typename M = typename Tile::M>
METAL_FUNC void load_queries(
    thread simdgroup_matrix<M, 8, 8> (&q)[Tile::ROW_BLOCKS][Tile::TILES],
    const device typename Tile::T* q_nope, const constant int64_t* nope_strides,
    const device typename Tile::T* q_pe, const constant int64_t* pe_strides, Span span, ushort simd,
    ushort lane) {
  constexpr int V = Tile::V, RANK_TILES = Tile::RANK_TILES, ROPE_TILES = Tile::ROPE_TILES;
  const short row = fragment_row(lane), pair = fragment_pair(lane);
  const long nope_step = nope_strides[3], pe_step = pe_strides[3];
  UNROLL for (int b = 0; b < Tile::ROW_BLOCKS; b++) {
    UNROLL for (int e = 0; e < 2; e++) {
      const int mine = span.first_row + 8 * b + 2 * pair + e;
      const bool there = mine < span.rows;
      const device typename Tile::T* nope = q_nope + query_offset(span, mine, nope_strides);
      const device typename Tile::T* rope = q_pe + query_offset(span, mine, pe_strides);
      UNROLL for (int i = 0; i < RANK_TILES; i++) {
        const int dim = simd * Tile::SLICE + i / (V / 2) * 4 * V + row / 2 * V +
                        i % (V / 2) * 2 + row % 2;
        q[b][i].thread_elements()[e] = there ? M(nope[dim * nope_step]) : M(0.0f);
      }
      UNROLL for (int i = 0; i < ROPE_TILES; i++) {
        const int dim = simd * Tile::ROPE_SLICE + row / 2 * 2 * ROPE_TILES + 2 * i + row % 2;
        q[b][RANK_TILES + i].thread_elements()[e] = there ? M(rope[dim * pe_step]) : M(0.0f);
      }
    }
  }
}

// A lane's share of one token. One that isn't `there` is not read: it gets the bits `instead`.
template <typename Tile, typename M = typename Tile::M>
METAL_FUNC void load_token(thread simdgroup_matrix<M, 8, 8> (&k)[Tile::TILES],
                           const device typename Tile::T* latent,
                           const device typename Tile::T* pe, bool there, uint instead) {
  typedef typename Tile::T T;
  constexpr int V = Tile::V, RANK_TILES = Tile::RANK_TILES;
  UNROLL for (int c = 0; c < RANK_TILES / (V / 2); c++) {
    uint4 raw = uint4(instead);
    if (there) {
      raw = *(const device uint4*)(latent + c * 4 * V);
    }
    UNROLL for (int i = 0; i < V / 2; i++) {
      const vec<T, 2> two = two_of(raw, i, T(0.0f));
      k[c * V / 2 + i].thread_elements()[0] = M(two[0]);
      k[c * V / 2 + i].thread_elements()[1] = M(two[1]);
    }
  }
  UNROLL for (int i = 0; i < Tile::ROPE_TILES; i++) {
    vec<T, 2> two = two_of(uint4(instead), 0, T(0.0f));
    if (there) {
      two = *(const device vec<T, 2>*)(pe + 2 * i);
    }
    k[RANK_TILES + i].thread_elements()[0] = M(two[0]);
    k[RANK_TILES + i].thread_elements()[1] = M(two[1]);
  }
}

// The matrix row is the token. Slots at or past `end` are not read and count as zeros, because a
// weight of 0 times NaN would be NaN. Tokens of a block that doesn't exist are NaN.
template <typename Tile, bool PAGED, typename Table, typename M = typename Tile::M>
METAL_FUNC void load_tokens(
    thread simdgroup_matrix<M, 8, 8> (&k)[Tile::TOKEN_BLOCKS][Tile::TILES],
    Cache<typename Tile::T> cache, Table table, thread Walk& w, int end, ushort lane) {
  const short row = fragment_row(lane);
  UNROLL for (int j = 0; j < Tile::TOKEN_BLOCKS; j++) {
    int id = 0;
    if (w.token < end) {  // the same for the whole simdgroup: 8 tokens never cross a block
      id = block_id<PAGED>(table, cache.column, w.block, lane);
    }
    const bool known = uint(id) < uint(cache.blocks), there = known && w.token + row < end;
    const int block = known ? id : 0, token = w.inside + row;
    load_token<Tile>(k[j], cache.latent + latent_offset(cache, block, token),
                     cache.pe + pe_offset(cache, block, token), there, known ? 0u : ~0u);
    walk(w, 8, cache.block_size);
  }
}

// S^T = K Q^T over the simdgroup's dimensions.
template <typename Tile, typename M = typename Tile::M>
METAL_FUNC void add_scores(
    thread simdgroup_matrix<M, 8, 8> (&k)[Tile::TOKEN_BLOCKS][Tile::TILES],
    thread simdgroup_matrix<M, 8, 8> (&q)[Tile::ROW_BLOCKS][Tile::TILES], threadgroup float* score,
    ushort lane) {
  const short row = fragment_row(lane), pair = fragment_pair(lane);
  UNROLL for (int j = 0; j < Tile::TOKEN_BLOCKS; j++) {
    simdgroup_float8x8 s[Tile::ROW_BLOCKS];
    UNROLL for (int b = 0; b < Tile::ROW_BLOCKS; b++) {
      s[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    UNROLL for (int i = 0; i < Tile::TILES; i++) {
      UNROLL for (int b = 0; b < Tile::ROW_BLOCKS; b++) {
        simdgroup_multiply_accumulate(s[b], k[j][i], q[b][i], s[b]);
      }
    }
    UNROLL for (int b = 0; b < Tile::ROW_BLOCKS; b++) {
      UNROLL for (int e = 0; e < 2; e++) {
        score[(8 * b + 2 * pair + e) * Tile::STRIDE + 8 * j + row] = s[b].thread_elements()[e];
      }
    }
  }
}

template <typename Tile>
METAL_FUNC int softmax_row(int part, ushort lane) {
  return part / Tile::APART * 8 + part % Tile::APART + lane / Tile::STEP * Tile::APART;
}

// Scores of the STEP tokens from `token` on become weights; the simdgroups take rows in turn.
template <typename Tile>
METAL_FUNC void softmax(Shared<Tile> shared, thread Running<Tile>& running, int token, float scale,
                        ushort simd, ushort lane) {
  constexpr int STEP = Tile::STEP;
  UNROLL for (int pass = 0; pass < Tile::PASSES; pass++) {
    const int part = simd + pass * Tile::SIMDS, row = softmax_row<Tile>(part, lane);
    const int column = lane % STEP;
    if (part < Tile::PARTS) {  // the same for the whole simdgroup
      float s = 0.0f;
      UNROLL for (int g = 0; g < Tile::SIMDS; g++) {
        s += shared.score[(g * Tile::ROWS + row) * Tile::STRIDE + column];
      }
      s = token + column < running.limit[pass] ? s * scale : -INFINITY;
      float top = s;
      UNROLL for (int step = STEP / 2; step > 0; step /= 2) {
        top = max(top, simd_shuffle_xor(top, step));
      }
      top = max(top, running.largest[pass]);
      const float base = top > -INFINITY ? top : 0.0f;  // a row may have seen no token yet
      const float factor = exp2(running.largest[pass] - base);
      const float e = exp2(s - base + Weight<typename Tile::M>::EXPONENT);
      running.weight[pass] = running.weight[pass] * factor + e;
      running.largest[pass] = top;
      shared.p[row * Tile::P_STRIDE + column] = typename Tile::P(e);
      if (column == 0) {
        shared.rescale[row] = factor;
      }
    }
  }
}

// O = O * rescale + P V over the simdgroup's dimensions.
template <typename Tile, typename M = typename Tile::M>
METAL_FUNC void add_values(
    thread simdgroup_float8x8 (&o)[Tile::ROW_BLOCKS][Tile::RANK_TILES],
    thread simdgroup_matrix<M, 8, 8> (&k)[Tile::TOKEN_BLOCKS][Tile::TILES], Shared<Tile> shared,
    ushort lane) {
  typedef typename Weight<M>::Used Used;
  const short row = fragment_row(lane), pair = fragment_pair(lane);
  float factor[Tile::ROW_BLOCKS];
  bool moved = false;
  UNROLL for (int b = 0; b < Tile::ROW_BLOCKS; b++) {
    factor[b] = shared.rescale[8 * b + row];
    moved = moved || factor[b] != 1.0f;
  }
  if (simd_any(moved)) {  // seldom, after the first tokens
    UNROLL for (int b = 0; b < Tile::ROW_BLOCKS; b++) {
      UNROLL for (int i = 0; i < Tile::RANK_TILES; i++) {
        o[b][i].thread_elements()[0] *= factor[b];
        o[b][i].thread_elements()[1] *= factor[b];
      }
    }
  }
  UNROLL for (int j = 0; j < Tile::TOKEN_BLOCKS; j++) {
    UNROLL for (int b = 0; b < Tile::ROW_BLOCKS; b++) {
      const threadgroup typename Tile::P* from =
          shared.p + (8 * b + row) * Tile::P_STRIDE + 8 * j + 2 * pair;
      simdgroup_matrix<Used, 8, 8> p;
      p.thread_elements()[0] = Used(from[0]);
      p.thread_elements()[1] = Used(from[1]);
      UNROLL for (int i = 0; i < Tile::RANK_TILES; i++) {
        simdgroup_multiply_accumulate(o[b][i], p, k[j][i], o[b][i]);
      }
    }
  }
}

// Sums the weights of each row over its lanes, and writes the LSE.
template <typename Tile>
METAL_FUNC void finish_softmax(Shared<Tile> shared, thread Running<Tile>& running, Span span,
                               device float* lse, ushort simd, ushort lane) {
  UNROLL for (int pass = 0; pass < Tile::PASSES; pass++) {
    const int part = simd + pass * Tile::SIMDS, row = softmax_row<Tile>(part, lane);
    if (part < Tile::PARTS) {
      float sum = running.weight[pass];
      UNROLL for (int step = Tile::STEP / 2; step > 0; step /= 2) {
        sum += simd_shuffle_xor(sum, step);
      }
      if (lane % Tile::STEP == 0) {
        shared.inverse[row] = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (span.first_row + row < span.rows) {
          lse[span.first_row + row] =
              natural_lse(running.largest[pass] - Weight<typename Tile::M>::EXPONENT, sum);
        }
      }
    }
  }
}

template <typename Tile, typename Out>
METAL_FUNC void store(thread simdgroup_float8x8 (&o)[Tile::ROW_BLOCKS][Tile::RANK_TILES],
                      threadgroup float* inverse, Span span, device Out* out, ushort simd,
                      ushort lane) {
  constexpr int V = Tile::V;
  const short row = fragment_row(lane), pair = fragment_pair(lane);
  UNROLL for (int b = 0; b < Tile::ROW_BLOCKS; b++) {
    const int mine = span.first_row + 8 * b + row;
    if (mine < span.rows) {
      const float by = inverse[8 * b + row];
      device Out* to = out + mine * Tile::RANK + simd * Tile::SLICE + pair * V;
      UNROLL for (int i = 0; i < Tile::RANK_TILES; i += 2) {  // two have 4 dimensions in a row
        vec<Out, 4> four;
        UNROLL for (int e = 0; e < 4; e++) {
          four[e] = Out(o[b][i + e / 2].thread_elements()[e % 2] * by);
        }
        *(device vec<Out, 4>*)(to + i / (V / 2) * 4 * V + i % (V / 2) * 2) = four;
      }
    }
  }
}

// One tile of rows against one piece; out [rows, RANK] and lse [rows] of that piece. AHEAD: the
// next tokens are loaded before the weights are waited for.
template <typename Tile, bool PAGED, bool AHEAD, typename Table, typename Out>
METAL_FUNC void matrix_tile(const device typename Tile::T* q_nope,
                            const constant int64_t* nope_strides,
                            const device typename Tile::T* q_pe,
                            const constant int64_t* pe_strides, Cache<typename Tile::T> cache,
                            Table table, Span span, device Out* out, device float* lse,
                            Shared<Tile> shared, ushort simd, ushort lane) {
  typedef simdgroup_matrix<typename Tile::M, 8, 8> Operand;
  if (span.begin >= span.end) {
    return nothing(span, Tile::ROWS, Tile::RANK, simd * 32 + lane, Tile::SIMDS * 32, out, lse);
  }
  Operand q[Tile::ROW_BLOCKS][Tile::TILES];
  load_queries<Tile>(q, q_nope, nope_strides, q_pe, pe_strides, span, simd, lane);
  simdgroup_float8x8 o[Tile::ROW_BLOCKS][Tile::RANK_TILES];
  UNROLL for (int b = 0; b < Tile::ROW_BLOCKS; b++) {
    UNROLL for (int i = 0; i < Tile::RANK_TILES; i++) {
      o[b][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
  Running<Tile> running;
  UNROLL for (int pass = 0; pass < Tile::PASSES; pass++) {
    running.largest[pass] = -INFINITY;
    running.weight[pass] = 0.0f;
    running.limit[pass] =
        row_end(span, span.first_row + softmax_row<Tile>(simd + pass * Tile::SIMDS, lane));
  }

  const short pair = fragment_pair(lane);
  cache.latent += simd * Tile::SLICE + pair * Tile::V;
  cache.pe += simd * Tile::ROPE_SLICE + pair * 2 * Tile::ROPE_TILES;
  Walk w = walk_from(span.begin, cache.block_size);
  Operand k[Tile::TOKEN_BLOCKS][Tile::TILES], next[Tile::TOKEN_BLOCKS][Tile::TILES];
  if (AHEAD) {
    load_tokens<Tile, PAGED>(next, cache, table, w, span.end, lane);
  }
  for (int token = span.begin; token < span.end; token += Tile::STEP) {
    if (AHEAD) {
      UNROLL for (int j = 0; j < Tile::TOKEN_BLOCKS; j++) {
        UNROLL for (int i = 0; i < Tile::TILES; i++) {
          k[j][i] = next[j][i];
        }
      }
    } else {
      load_tokens<Tile, PAGED>(k, cache, table, w, span.end, lane);
    }
    add_scores<Tile>(k, q, shared.score + simd * Tile::ROWS * Tile::STRIDE, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // A: score is complete; p, rescale were read
    softmax(shared, running, token, span.scale, simd, lane);
    if (AHEAD) {
      load_tokens<Tile, PAGED>(next, cache, table, w, span.end, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // B: p, rescale are complete; score was read
    add_values(o, k, shared, lane);
  }
  finish_softmax(shared, running, span, lse, simd, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // C: inverse is complete
  store<Tile>(o, shared.inverse, span, out, simd, lane);
}
