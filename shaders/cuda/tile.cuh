// One tile of tokens on tensor cores, transposed, so that rows are padded to a multiple of 8 only:
// S^T [tokens, rows] = K Q^T and O^T [dims, rows] += V^T P^T. Eight warps: in the first product a
// warp takes a quarter of the dims and half of the tokens, in the second an eighth of the dims.
//
// A tile lies in shared memory as 8 groups of GROUP tokens that follow each other in the cache, 16
// bytes between groups. Row n of each 8 x 8 matrix comes from group n: so the rows lie in different
// banks, and a group can be copied in one piece. Scores and weights keep that order: their token v
// is token v % 8 * GROUP + v / 8 of the tile.
//
// Defined by the back end: TOKENS of a tile.
namespace mla {
constexpr int NT = ROWS / 8, GROUP = TOKENS / 8, STEPS = RANK / 64, SLICES = RANK / 128;
constexpr int LATENT_ROW = (PAGED ? RANK + ROPE : RANK) * 2;  // bytes, as all sizes here
constexpr int LATENT_GROUP = GROUP * LATENT_ROW + 16;
constexpr int PE_ROW = PAGED ? LATENT_ROW : ROPE * 2, PE_GROUP = GROUP * PE_ROW + 16;
constexpr int PE_AT = PAGED ? RANK * 2 : 8 * LATENT_GROUP;
constexpr int TILE_BYTES = 8 * LATENT_GROUP + (PAGED || !ROPE ? 0 : 8 * PE_GROUP);
// Scores of four quarters [4, ROWS, TOKENS], weights in two parts [2, ROWS, TOKENS]; of each row a
// factor, and one past the last token that it sees.
constexpr int SCORE_ROW = TOKENS + 4, WEIGHT_ROW = TOKENS * 2 + 16;  // floats; bytes
constexpr int UNKNOWN_AT = 240, FACTOR_AT = 256, END_AT = FACTOR_AT + ROWS * 4;
constexpr int WEIGHT_AT = END_AT + ROWS * 4;
constexpr int PART_BYTES = ROWS * WEIGHT_ROW, SCORE_AT = WEIGHT_AT + 2 * PART_BYTES;
constexpr int TILES_AT = (SCORE_AT + 4 * ROWS * SCORE_ROW * 4 + 127) / 128 * 128;

MLA u32 latent_at(int token) { return token / GROUP * LATENT_GROUP + token % GROUP * LATENT_ROW; }
MLA u32 pe_at(int token) { return PE_AT + token / GROUP * PE_GROUP + token % GROUP * PE_ROW; }

// A thread's share of Q, of the sums of its rows and of O.
struct Sums {
  u32 q[STEPS + (ROPE > 0)][NT][2];
  float o[SLICES][NT][4];
  float top[NT], sum[NT];
};

template <bool PAIRS>
MLA void load_queries(Sums& s, const Query& query, const Work& w) {
  const int quarter = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int mine = w.first + j * 8 + (lane >> 2), head = mine / w.q_len, pair = lane % 4 * 2;
    const bool there = mine < w.rows;
    const i64 q = mine - head * w.q_len;
    const Bits* nope = query.nope + head * query.nope_head + q * query.nope_query;
    const Bits* pe = query.pe + head * query.pe_head + q * query.pe_query;
#pragma unroll
    for (int i = 0; i < STEPS + (ROPE > 0); ++i)
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const bool rope = i == STEPS;
        const int at = (rope ? quarter : quarter * STEPS + i) * 16 + pair + 8 * x;
        const i64 dim = PAIRS ? 1 : rope ? query.pe_dim : query.nope_dim;
        const Bits* two = (rope ? pe : nope) + at * dim;
        s.q[i][j][x] = 0;
        if (there && (!rope || at < ROPE)) s.q[i][j][x] = PAIRS ? *(const u32*)two : gather_two(two, dim);
      }
  }
}

MLA void begin(Sums& s, const Query& query, const Work& w, u8* shared) {
  if (aligned(4, query))
    load_queries<true>(s, query, w);
  else
    load_queries<false>(s, query, w);
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < SLICES; ++i)
#pragma unroll
      for (int x = 0; x < 4; ++x) s.o[i][j][x] = 0.0f;
    s.top[j] = minus_infinity();
    s.sum[j] = 0.0f;
  }
  const int row = threadIdx.x;
  if (row < ROWS) ((int*)(shared + END_AT))[row] = row_end(w, w.first + row);
}

MLA void add_scores(const Sums& s, u32 tile, u8* shared) {
  constexpr int BLOCKS = TOKENS / 32;  // of 16 tokens
  const int warp = threadIdx.x >> 5, quarter = warp & 3, half = warp >> 2, lane = threadIdx.x & 31;
  const int inner = half * BLOCKS * 2 + (lane >> 3 & 1), right = (lane >> 4) * 16;
  float score[BLOCKS][NT][4] = {};
  const u32 k = tile + (lane & 7) * LATENT_GROUP + inner * LATENT_ROW + quarter * STEPS * 32 + right;
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) {
      u32 a[4];
      load_matrices(a, k + m * 2 * LATENT_ROW + i * 32);
#pragma unroll
      for (int j = 0; j < NT; ++j) multiply(score[m][j], a, s.q[i][j]);
    }
  if (quarter * 16 < ROPE) {
    const u32 pe = tile + PE_AT + (lane & 7) * PE_GROUP + inner * PE_ROW + quarter * 32 + right;
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) {
      u32 a[4];
      load_matrices(a, pe + m * 2 * PE_ROW);
#pragma unroll
      for (int j = 0; j < NT; ++j) multiply(score[m][j], a, s.q[STEPS][j]);
    }
  }
  float* to = (float*)(shared + SCORE_AT) + quarter * ROWS * SCORE_ROW + half * BLOCKS * 16;
#pragma unroll
  for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int row = j * 8 + lane % 4 * 2 + x % 2;
        to[row * SCORE_ROW + m * 16 + x / 2 * 8 + (lane >> 2)] = score[m][j][x];
      }
}

// Scores to weights; a warp takes every eighth row, a lane every 32nd token. `at`: of the tile.
MLA void add_weights(Sums& s, const Work& w, int at, u8* shared) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, parts = weight_parts(w);
  const float* scores = (const float*)(shared + SCORE_AT);
  float score[NT][TOKENS / 32], top[NT];
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const int end = ((const int*)(shared + END_AT))[i * 8 + warp];
    top[i] = s.top[i];
#pragma unroll
    for (int j = 0; j < TOKENS / 32; ++j) {
      const int v = j * 32 + lane;
      const float* from = scores + (i * 8 + warp) * SCORE_ROW + v;
      constexpr int QUARTER = ROWS * SCORE_ROW;
      const float sum = (from[0] + from[QUARTER]) + (from[2 * QUARTER] + from[3 * QUARTER]);
      const bool seen = at + v % 8 * GROUP + v / 8 < end;
      score[i][j] = seen ? sum * w.scale : minus_infinity();
      top[i] = fmaxf(top[i], score[i][j]);
    }
  }
#pragma unroll
  for (int step = 16; step; step >>= 1)
#pragma unroll
    for (int i = 0; i < NT; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const int row = i * 8 + warp;
    const float base = top[i] == minus_infinity() ? 0.0f : top[i];  // no token seen yet
    const float factor = exp2_fast(s.top[i] - base);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < TOKENS / 32; ++j) {
      const float weight = exp2_fast(score[i][j] - base + EXPONENT);
      sum += weight;
      unsigned short* to = (unsigned short*)(shared + WEIGHT_AT + row * WEIGHT_ROW) + j * 32 + lane;
      const u32 rounded = pack(weight, 0.0f);
      *to = rounded;
      if (parts > 1) to[PART_BYTES / 2] = pack(weight - lower(rounded), 0.0f);
    }
    s.top[i] = top[i];
    s.sum[i] = s.sum[i] * factor + sum;
    if (lane == 0) ((float*)(shared + FACTOR_AT))[row] = factor;
  }
}

MLA void scale_output(Sums& s, const u8* shared) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const float2 by = ((const float2*)(shared + FACTOR_AT))[j * 4 + threadIdx.x % 4];
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
      s.o[i][j][0] *= by.x;
      s.o[i][j][1] *= by.y;
      s.o[i][j][2] *= by.x;
      s.o[i][j][3] *= by.y;
    }
  }
}

MLA void add_values(Sums& s, const Work& w, u32 tile, u8* shared) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 v = tile + (lane & 7) * LATENT_GROUP + (lane >> 4) * LATENT_ROW + warp * SLICES * 32 + (lane >> 3 & 1) * 16;
  u32 p = shared_address(shared + WEIGHT_AT) + (lane & 7) * WEIGHT_ROW + (lane >> 3 & 1) * 16;
  scale_output(s, shared);
#pragma unroll 1
  for (int part = weight_parts(w); part; --part, p += PART_BYTES)
#pragma unroll
    for (int k = 0; k < TOKENS / 16; ++k) {
      u32 weight[NT][2];
#pragma unroll
      for (int j = 0; j < NT; ++j) load_two_matrices(weight[j], p + j * 8 * WEIGHT_ROW + k * 32);
#pragma unroll
      for (int i = 0; i < SLICES; ++i) {
        u32 a[4];
        load_matrices_transposed(a, v + k * 2 * LATENT_ROW + i * 32);
#pragma unroll
        for (int j = 0; j < NT; ++j) multiply(s.o[i][j], a, weight[j]);
      }
    }
}

// Sums of this warp's rows, and what final outputs are to be multiplied with.
MLA void end_sums(Sums& s, const Work& w, const Result& r, u8* shared) {
  const bool unknown = *(const int*)(shared + UNKNOWN_AT);
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const int row = i * 8 + (threadIdx.x >> 5), mine = w.first + row;
    float sum = s.sum[i];
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    sum = final_sum(sum, unknown && ((const int*)(shared + END_AT))[row] > w.begin);
    if (threadIdx.x % 32 == 0) {
      if (r.alone) ((float*)(shared + FACTOR_AT))[row] = inverse(sum);
      if (mine < w.rows) write_sums(r, mine, s.top[i] - EXPONENT, sum);
    }
  }
}

// Calls f(row of the tile, dim, value) for all that this thread has.
template <typename F>
MLA void each_output(const Sums& s, F f) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int i = 0; i < SLICES; ++i)
#pragma unroll
      for (int x = 0; x < 4; ++x)
        f(j * 8 + lane % 4 * 2 + x % 2, (warp * SLICES + i) * 16 + x / 2 * 8 + (lane >> 2), s.o[i][j][x]);
}

// `sync`: of the threads that compute.
template <typename Sync>
MLA void write(Sums& s, const Work& w, const Result& r, u8* shared, Sync sync) {
  if (!r.alone) {
    each_output(s, [&](int row, int dim, float value) {
      if (w.first + row < w.rows) __stcg((float*)r.out + (i64)(w.first + row) * RANK + dim, value);
    });
    return end_sums(s, w, r, shared);
  }
  sync();  // all have read the factors of the last tile
  end_sums(s, w, r, shared);
  sync();
  scale_output(s, shared);
  each_output(s, [&](int row, int dim, float value) {
    if (w.first + row < w.rows) r.out[(i64)(w.first + row) * RANK + dim] = pack(value, 0.0f);
  });
}
}  // namespace mla
