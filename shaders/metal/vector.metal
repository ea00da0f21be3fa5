// A simdgroup takes ROWS rows and STEP tokens at a time; a lane holds RANK / 32 latent and ROPE /
// 32 rope dimensions. GROUPS simdgroups share the same tokens for other rows; the SIMDS / GROUPS
// streams take tokens in turn and are merged at the end. The STEP * ROWS dot products of a step are
// summed over the lanes together, by halving: lane i ends with product i % PAIRS, so that mask,
// exp2 and sums cost one instruction a step and not one a product.

// Templates, so that `s` is only indexed by constants and stays in registers.
template <int STEP, int PAIRS>
METAL_FUNC void fold(thread float (&s)[PAIRS]) {
  UNROLL for (int i = 0; i < PAIRS; i++) {
    s[i] += simd_shuffle_xor(s[i], STEP);
  }
}
// Lanes whose number has the bit STEP keep the upper half of 2 * STEP sums, the others the lower.
template <int STEP, int PAIRS>
METAL_FUNC void halve(thread float (&s)[PAIRS], ushort lane) {
  const bool upper = lane & STEP;
  UNROLL for (int i = 0; i < STEP && i + STEP < PAIRS; i++) {
    // Values: a choice between elements would keep `s` in memory.
    const float low = s[i], high = s[i + STEP];
    s[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, STEP);
  }
}
template <int PAIRS>
METAL_FUNC float sum_over_lanes(thread float (&s)[PAIRS], ushort lane) {
  static_assert(PAIRS == 8 || PAIRS == 16, "one or two rows of 8 tokens");
  fold<16>(s);
  if (PAIRS == 8) {
    fold<8>(s);
  } else {
    halve<8>(s, lane);
  }
  halve<4>(s, lane);
  halve<2>(s, lane);
  halve<1>(s, lane);
  return s[0];
}

// Queries [tile rows, RANK + ROPE], times the scale. Rows past the last are zeros.
template <int RANK, int ROPE, typename T>
METAL_FUNC void load_queries(threadgroup float* queries, int tile_rows, const device T* q_nope,
                             const constant int64_t* nope_strides, const device T* q_pe,
                             const constant int64_t* pe_strides, Span span, int thread_index,
                             int threads) {
  constexpr int DIM = RANK + ROPE;
  for (int i = thread_index; i < tile_rows * DIM; i += threads) {
    const int row = span.first_row + i / DIM, dim = i % DIM;
    float value = 0.0f;
    if (row < span.rows) {
      value = dim < RANK
                  ? float(q_nope[query_offset(span, row, nope_strides) + dim * nope_strides[3]])
                  : float(q_pe[query_offset(span, row, pe_strides) + (dim - RANK) * pe_strides[3]]);
    }
    queries[i] = value * span.scale;
  }
}

// STEP neighbouring tokens. At the end of the piece the last one stands in for those after it.
template <typename T>
struct Tokens {
  const device T* latent;
  const device T* pe;
  int latent_token, pe_token;  // strides; 32 bits are enough for 8 tokens
  int last;                   // token that is the piece's last, counted from here
};
template <typename T>
METAL_FUNC vec<T, 4> latent_of(Tokens<T> tokens, int j, int dim) {
  const device T* token = tokens.latent + min(j, tokens.last) * tokens.latent_token;
  return *(const device vec<T, 4>*)(token + dim);
}

// A lane's share of the dot products [ROWS, STEP].
template <int RANK, int ROPE, int ROWS, int STEP, typename T>
METAL_FUNC void add_scores(thread float (&s)[ROWS * STEP], Tokens<T> tokens,
                           const threadgroup float* queries, ushort lane) {
  constexpr int DIM = RANK + ROPE;
  UNROLL for (int i = 0; i < ROWS * STEP; i++) {
    s[i] = 0.0f;
  }
  UNROLL for (int c = 0; c < RANK / 128; c++) {
    const int dim = c * 128 + lane * 4;
    vec<float, 4> q[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
      q[r] = *(const threadgroup vec<float, 4>*)(queries + r * DIM + dim);
    }
    UNROLL for (int j = 0; j < STEP; j++) {
      const vec<T, 4> k = latent_of(tokens, j, dim);
      UNROLL for (int e = 0; e < 4; e++) {
        UNROLL for (int r = 0; r < ROWS; r++) {
          s[r * STEP + j] = fma(q[r][e], float(k[e]), s[r * STEP + j]);
        }
      }
    }
  }
  UNROLL for (int e = 0; e < ROPE / 32; e++) {
    const int dim = lane * (ROPE / 32) + e;
    UNROLL for (int j = 0; j < STEP; j++) {
      const float k = float(tokens.pe[min(j, tokens.last) * tokens.pe_token + dim]);
      UNROLL for (int r = 0; r < ROWS; r++) {
        s[r * STEP + j] = fma(queries[r * DIM + RANK + dim], k, s[r * STEP + j]);
      }
    }
  }
}

// Weight of the lane's score; `factor` is what earlier sums of its row are worth now.
template <int STEP>
METAL_FUNC float weigh(float score, thread float& largest, thread float& weight,
                       thread float& factor) {
  float top = score;
  UNROLL for (int step = STEP / 2; step > 0; step /= 2) {
    top = max(top, simd_shuffle_xor(top, step));
  }
  top = max(top, largest);
  const float base = top > -INFINITY ? top : 0.0f;  // a row may have seen no token yet
  const float e = exp2(score - base);
  factor = exp2(largest - base);
  weight = fma(weight, factor, e);
  largest = top;
  return e;
}

template <int RANK, int ROWS, int STEP>
METAL_FUNC void rescale(thread float (&o)[ROWS][RANK / 32], float factor) {
  if (simd_any(factor != 1.0f)) {  // seldom, after the first tokens
    UNROLL for (int r = 0; r < ROWS; r++) {
      const float by = simd_shuffle(factor, r * STEP);
      UNROLL for (int i = 0; i < RANK / 32; i++) {
        o[r][i] *= by;
      }
    }
  }
}

// O += P V. Lane r * STEP + j has the weight of row r and token j.
template <int RANK, int ROWS, int STEP, typename T>
METAL_FUNC void add_values(thread float (&o)[ROWS][RANK / 32], Tokens<T> tokens, float weight,
                           ushort lane) {
  // Read again, through the caches. The barrier is for the compiler alone: it must not merge this
  // read with the first and keep all tokens in registers.
  simdgroup_barrier(mem_flags::mem_device);
  UNROLL for (int j = 0; j < STEP; j++) {
    float p[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
      p[r] = simd_shuffle(weight, r * STEP + j);
    }
    UNROLL for (int c = 0; c < RANK / 128; c++) {
      const vec<T, 4> v = latent_of(tokens, j, c * 128 + lane * 4);
      UNROLL for (int e = 0; e < 4; e++) {
        UNROLL for (int r = 0; r < ROWS; r++) {
          o[r][4 * c + e] = fma(p[r], float(v[e]), o[r][4 * c + e]);
        }
      }
    }
  }
}

// Sums row r of all streams of a group; each stream writes its share of the dimensions.
template <int RANK, int SIMDS, int GROUPS, int ROWS, typename Out>
METAL_FUNC void merge_row(thread float (&o)[RANK / 32], int r, int row, Span span,
                          threadgroup float* sums,          // [SIMDS, RANK]
                          const threadgroup float* tops,    // [SIMDS, ROWS]
                          const threadgroup float* weights,  // [SIMDS, ROWS]
                          device Out* out, device float* lse, ushort simd, ushort lane) {
  constexpr int STREAMS = SIMDS / GROUPS, SHARE = RANK / STREAMS;
  const int group = simd % GROUPS, stream = simd / GROUPS;
  float top = -INFINITY, total = 0.0f;
  for (int i = group; i < SIMDS; i += GROUPS) {
    top = max(top, tops[i * ROWS + r]);
  }
  const float base = top > -INFINITY ? top : 0.0f;
  for (int i = group; i < SIMDS; i += GROUPS) {
    total += weights[i * ROWS + r] * exp2(tops[i * ROWS + r] - base);
  }
  const float by = total == 0.0f ? 0.0f : exp2(tops[simd * ROWS + r] - base) / total;
  UNROLL for (int c = 0; c < RANK / 128; c++) {
    vec<float, 4> four;
    UNROLL for (int e = 0; e < 4; e++) {
      four[e] = o[4 * c + e] * by;
    }
    *(threadgroup vec<float, 4>*)(sums + simd * RANK + c * 128 + lane * 4) = four;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // F: the sums of row r are complete
  if (row < span.rows) {
    for (int d = stream * SHARE + lane; d < (stream + 1) * SHARE; d += 32) {
      float sum = 0.0f;
      UNROLL for (int i = 0; i < STREAMS; i++) {
        sum += sums[(i * GROUPS + group) * RANK + d];
      }
      out[row * RANK + d] = Out(sum);
    }
    if (stream == 0 && lane == 0) {
      lse[row] = natural_lse(top, total);
    }
  }
}

// One tile of rows against one piece; out [rows, RANK] and lse [rows] of that piece.
template <int RANK, int ROPE, int SIMDS, int GROUPS, int ROWS, int STEP, bool PAGED, typename T,
          typename Table, typename Out>
METAL_FUNC void vector_tile(
    const device T* q_nope, const constant int64_t* nope_strides, const device T* q_pe,
    const constant int64_t* pe_strides, Cache<T> cache, Table table, Span span, device Out* out,
    device float* lse,
    threadgroup float* shared,  // queries [GROUPS * ROWS, RANK + ROPE], later sums [SIMDS, RANK]
    threadgroup float* tops, threadgroup float* weights,  // [SIMDS, ROWS]
    ushort simd, ushort lane) {
  constexpr int PAIRS = STEP * ROWS, STREAMS = SIMDS / GROUPS, THREADS = SIMDS * 32;
  static_assert(RANK % 128 == 0 && ROPE % 32 == 0 && SIMDS % GROUPS == 0, "even shares");
  const int thread_index = simd * 32 + lane;
  if (span.begin >= span.end) {
    return nothing(span, GROUPS * ROWS, RANK, thread_index, THREADS, out, lse);
  }
  load_queries<RANK, ROPE>(shared, GROUPS * ROWS, q_nope, nope_strides, q_pe, pe_strides, span,
                           thread_index, THREADS);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // D: the queries are complete

  const int group = simd % GROUPS, stream = simd / GROUPS;
  const threadgroup float* queries = shared + group * ROWS * (RANK + ROPE);
  const int pair = lane % PAIRS, first_row = span.first_row + group * ROWS;
  const int limit = row_end(span, first_row + pair / STEP);
  float o[ROWS][RANK / 32], largest = -INFINITY, weight = 0.0f;
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int i = 0; i < RANK / 32; i++) {
      o[r][i] = 0.0f;
    }
  }

  Walk w = walk_from(span.begin + stream * STEP, cache.block_size);
  for (; w.token < span.end; walk(w, STREAMS * STEP, cache.block_size)) {
    const int id = block_id<PAGED>(table, cache.column, w.block, lane);
    if (uint(id) >= uint(cache.blocks)) {  // the same for the whole simdgroup
      weight = NAN;
      break;
    }
    Tokens<T> tokens;
    tokens.latent = cache.latent + latent_offset(cache, id, w.inside);
    tokens.pe = cache.pe + pe_offset(cache, id, w.inside);
    tokens.latent_token = cache.latent_token;
    tokens.pe_token = cache.pe_token;
    tokens.last = span.end - 1 - w.token;

    float s[PAIRS];
    add_scores<RANK, ROPE, ROWS, STEP>(s, tokens, queries, lane);
    const float score = sum_over_lanes(s, lane);
    const float mine = w.token + pair % STEP < limit ? score : -INFINITY;
    float factor;
    const float e = weigh<STEP>(mine, largest, weight, factor);
    rescale<RANK, ROWS, STEP>(o, factor);
    add_values<RANK, ROWS, STEP>(o, tokens, e, lane);
  }

  UNROLL for (int step = STEP / 2; step > 0; step /= 2) {
    weight += simd_shuffle_xor(weight, step);
  }
  if (lane < PAIRS && lane % STEP == 0) {
    tops[simd * ROWS + lane / STEP] = largest;
    weights[simd * ROWS + lane / STEP] = weight;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // E: tops, weights complete; queries read
  UNROLL for (int r = 0; r < ROWS; r++) {
    if (r > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // G: the sums of row r - 1 were read
    }
    merge_row<RANK, SIMDS, GROUPS, ROWS>(o[r], r, first_row + r, span, shared, tops, weights, out,
                                         lse, simd, lane);
  }
}
