// 64 rows (sm_90): two groups of 128 threads compute, a third copies tiles of 48 tokens ahead of them
// into a ring of three places. The groups score the tiles in turn, and each owns half of the 512
// dims of the output: it multiplies the values by its own weights, which it has in registers, and by
// the other's, which come through shared memory. So one's softmax overlaps products of the other's.
// A tile is nine sub-tiles of 64 dims, swizzled as the products want it; so is Q, whose last two
// sub-tiles move to registers: they pass through the ring's first place, as fill 0; tile i is fill i + 1.
namespace mla {
static_assert(RANK == 512 && ROPE == 64 && ROWS == 64 && TOKENS == 48, "the layout below");
constexpr int Q_SUB = ROWS * 128, SUB = TOKENS * 128, TILE_BYTES = 9 * SUB;
constexpr int SCORES = TOKENS / 2, STEPS = TOKENS / 16;  // of a thread; of a product with values
constexpr int RING_AT = 7 * Q_SUB, WEIGHT_AT = RING_AT + STAGES * TILE_BYTES, TOP_AT = WEIGHT_AT + ROWS * 128;
// Barriers: two of a stage's fills; of each group's weights; of sums; of the copiers' end.
constexpr int FULL_AT = TOP_AT + 2 * ROWS * 4, EMPTY_AT = FULL_AT + STAGES * 16, READY_AT = EMPTY_AT + STAGES * 16;
constexpr int TAKEN_AT = READY_AT + 16, SUMMED_AT = TAKEN_AT + 16, COPIED_AT = SUMMED_AT + 8;
constexpr int UNKNOWN_AT = COPIED_AT + 8;
static_assert(UNKNOWN_AT + 4 <= SHARED, "shared memory");

// Where a fill lies, and the barriers that tell when it is there and when its place is free: each half
// of the dims, as the group is done that multiplies its values. That is later than all have scored.
struct Place {
  u32 at, full, empty, parity;
};
MLA Place place(u32 shared, int fill) {
  const int turn = fill / STAGES, stage = fill - turn * STAGES;
  Place p;
  p.at = shared + RING_AT + stage * TILE_BYTES;
  p.full = shared + FULL_AT + stage * 16;
  p.empty = shared + EMPTY_AT + stage * 16;
  p.parity = turn & 1;
  return p;
}

// Eight threads copy a row, each of them 16 bytes of each sub-tile; those lie STEP bytes apart. `from`
// is where its first 16 are. No such row: zeros. Here half of the latent's numbers.
template <int STEP>
MLA void copy_half(u8* to, const Bits* from, int half, bool there) {
  async_copy_four<STEP>(shared_address(to + half * 4 * STEP), from + half * 256, there ? 16 : 0);
}
// A whole row where rows are not whole sixteens of bytes.
template <int STEP>
MLA void gather_row(u8* to, Slot from, i64 dim, i64 pe_dim, bool there) {
  const int at = threadIdx.x % 8 * 8;
#pragma unroll 1
  for (int i = 0; i < 9; ++i) {
    const Bits* eight = i < 8 ? from.latent + (at + i * 64) * dim : from.pe + at * pe_dim;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (there) x = gather_eight(eight, i < 8 ? dim : pe_dim);
    *(uint4*)(to + i * STEP) = x;
  }
}

// `sixteens`: once this thread's copies are there, as well.
MLA void filled(u32 full, bool sixteens) {
  if (sixteens)
    barrier_arrive_copied(full);
  else
    barrier_arrive(full);
}

MLA void copy_queries(const Query& query, const Work& w, u8* to, u32 full) {
  const bool sixteens = aligned(16, query);
  const int at = threadIdx.x % 8 * 8;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int mine = w.first + (threadIdx.x - 256) / 8 + 16 * i;
    const bool there = mine < w.rows;
    const int row = there ? mine : 0, head = row / w.q_len, q = row - head * w.q_len;
    Slot from;
    from.latent = query.nope + head * query.nope_head + q * query.nope_query;
    from.pe = query.pe + head * query.pe_head + q * query.pe_query;
    u8* row_to = to + i * 2048;
    if (sixteens) {
      copy_half<Q_SUB>(row_to, from.latent + at, 0, there);
      copy_half<Q_SUB>(row_to, from.latent + at, 1, there);
      async_copy(shared_address(row_to + 8 * Q_SUB), from.pe + at, there ? 16 : 0);
    } else {
      gather_row<Q_SUB>(row_to, from, query.nope_dim, query.pe_dim, there);
    }
  }
  filled(full, sixteens);
  filled(full + 8, sixteens);
}

// One tile as far as this thread copies it: 16 bytes of every sub-tile of rows `row`, + 16 and + 32.
// The half of the group that scored here before is free first.
MLA void copy_tile(const Cache& c, const Work& w, const Place& p, int token, const int (&id)[STEPS], int first, u8* to,
                   int* unknown) {
  const int at = threadIdx.x % 8 * 8;
  const Bits* from[STEPS];
  barrier_wait(p.empty + 8 * first, p.parity ^ 1);
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    const bool there = token + 16 * j < w.end;  // else zeros: weight 0 times NaN is NaN
    const Slot s = slot(c, w, known_block(w, id[j], unknown), there ? token + 16 * j : w.begin);
    from[j] = s.latent + at;
    async_copy(shared_address(to + 8 * SUB + j * 2048), s.pe + at, there ? 16 : 0);
    copy_half<SUB>(to + j * 2048, from[j], first, there);
  }
  filled(p.full + 8 * first, true);
  barrier_wait(p.empty + 8 * (first ^ 1), p.parity ^ 1);
#pragma unroll
  for (int j = 0; j < STEPS; ++j) copy_half<SUB>(to + j * 2048, from[j], first ^ 1, token + 16 * j < w.end);
  filled(p.full + 8 * (first ^ 1), true);
}
MLA void gather_tile(const Cache& c, const Work& w, const Place& p, int token, u8* to, int* unknown) {
  barrier_wait(p.empty, p.parity ^ 1);
  barrier_wait(p.empty + 8, p.parity ^ 1);
#pragma unroll 1
  for (int j = 0; j < STEPS; ++j) {
    const int mine = token + 16 * j;
    const int block = known_block(w, block_id(c, w, mine), unknown);
    const bool there = mine < w.end;
    gather_row<SUB>(to + j * 2048, slot(c, w, block, there ? mine : w.begin), c.dim, c.pe_dim, there);
  }
  filled(p.full, false);
  filled(p.full + 8, false);
}

MLA void copy_tiles(const Query& query, const Cache& c, const Work& w, int count, u8* shared) {
  const u32 base = shared_address(shared);
  const int row = (threadIdx.x - 256) / 8;
  u8* mine = shared + row * 128 + (threadIdx.x % 8 ^ row % 8) * 16;
  int* unknown = (int*)(shared + UNKNOWN_AT);
  int id[STEPS];  // of the next tile
#pragma unroll
  for (int j = 0; j < STEPS; ++j) id[j] = block_id(c, w, w.begin + row + 16 * j);
  if (count) copy_queries(query, w, mine, place(base, 0).full);
  if (aligned(16, c)) {
    for (int i = 0; i < count; ++i) {
      const Place p = place(base, i + 1);
      const int token = w.begin + i * TOKENS + row;
      copy_tile(c, w, p, token, id, (i & 1) ^ 1, mine + (p.at - base), unknown);
#pragma unroll
      for (int j = 0; j < STEPS; ++j) id[j] = block_id(c, w, token + TOKENS + 16 * j);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Place p = place(base, i + 1);
      gather_tile(c, w, p, w.begin + i * TOKENS + row, mine + (p.at - base), unknown);
    }
  }
  barrier_arrive(base + COPIED_AT);  // `unknown` is written
}

// A thread's two rows, `row` and row + 8 of the block.
struct Rows {
  int row, end[2];
  float top[2], sum[2];  // of the scores, times log2(e); of this group's weights
};
MLA float seen(float top) { return top == minus_infinity() ? 0.0f : top; }  // no token yet: any number
// Takes larger tops. What was weighed before is to be multiplied by `factor`.
MLA void raise(Rows& x, const float (&top)[2], float (&factor)[2]) {
#pragma unroll
  for (int y = 0; y < 2; ++y) {
    factor[y] = exp2_fast(x.top[y] - seen(top[y]));
    x.top[y] = top[y];
    x.sum[y] *= factor[y];
  }
}
MLA void rescale(float (&o)[128], const float (&factor)[2]) {
  if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {  // seldom, after the first tiles
#pragma unroll
    for (int j = 0; j < 128; ++j) o[j] *= factor[j / 2 % 2];
  }
}

// Scores [6 blocks of 8 tokens, 2 rows, 2 tokens], the first of `token`, become weights.
MLA void weigh(float (&s)[SCORES], Rows& x, int token, float scale, float (&factor)[2]) {
  float top[2] = {x.top[0], x.top[1]};
#pragma unroll
  for (int j = 0; j < SCORES; ++j) {
    const int y = j / 2 % 2;
    s[j] = token + j / 4 * 8 + j % 2 < x.end[y] ? s[j] * scale : minus_infinity();
    top[y] = fmaxf(top[y], s[j]);
  }
#pragma unroll
  for (int y = 0; y < 2; ++y) {
    top[y] = fmaxf(top[y], __shfl_xor_sync(~0u, top[y], 1));
    top[y] = fmaxf(top[y], __shfl_xor_sync(~0u, top[y], 2));
  }
  raise(x, top, factor);
  const float base[2] = {seen(top[0]) - EXPONENT, seen(top[1]) - EXPONENT};
#pragma unroll
  for (int j = 0; j < SCORES; ++j) {
    const int y = j / 2 % 2;
    s[j] = exp2_fast(s[j] - base[y]);
    x.sum[y] += s[j];
  }
}

// Weights as 16-bit numbers, for products.
MLA void round_weights(const float (&s)[SCORES], u32 (&p)[STEPS][4]) {
#pragma unroll
  for (int j = 0; j < SCORES / 2; ++j) p[j / 4][j % 4] = pack(s[2 * j], s[2 * j + 1]);
}
// What that left out.
MLA void keep_rest(float (&s)[SCORES], const u32 (&p)[STEPS][4]) {
#pragma unroll
  for (int j = 0; j < SCORES / 2; ++j) {
    s[2 * j] -= lower(p[j / 4][j % 4]);
    s[2 * j + 1] -= upper(p[j / 4][j % 4]);
  }
}
MLA void write_weights(const u32 (&p)[STEPS][4], int row, u8* shared) {
  u8* to = shared + WEIGHT_AT + row * 128 + threadIdx.x % 4 * 4;
#pragma unroll
  for (int j = 0; j < STEPS * 4; ++j) *(u32*)(to + j % 2 * 1024 + (j / 2 ^ row % 8) * 16) = p[j / 4][j % 4];
  shared_written();
}

MLA u64 values(u32 tile, int group) { return operand(tile + group * 4 * SUB, SUB, 1024); }
// Values times the other group's weights, not waited for, and times this one's.
MLA void add_theirs(float (&o)[128], u32 weights, u64 v) {
  const u64 p = operand(weights, 16, 1024);
  keep(o);
  products_begin();
#pragma unroll
  for (int j = 0; j < STEPS; ++j) multiply_values(o, p + j * 2, v + j * 128);
  products_commit();
}
MLA void add_own(float (&o)[128], const u32 (&p)[STEPS][4], u64 v) {
  keep(o);
  products_begin();
#pragma unroll
  for (int j = 0; j < STEPS; ++j) multiply_values(o, p[j], v + j * 128);
  products_commit();
  products_wait<0>();
  keep(o);
}

MLA void score(float (&s)[SCORES], const u32 (&held)[8][4], u32 queries, u32 tile) {
  const u64 q = operand(queries, 16, 1024), k = operand(tile, 16, 1024);
  products_begin();
#pragma unroll
  for (int j = 0; j < 28; ++j)
    multiply_scores(s, q + (j / 4 * Q_SUB + j % 4 * 32 >> 4), k + (j / 4 * SUB + j % 4 * 32 >> 4), j != 0);
#pragma unroll
  for (int j = 28; j < 36; ++j) multiply_scores(s, held[j - 28], k + (j / 4 * SUB + j % 4 * 32 >> 4));
  products_commit();
}

// The half that is there first, then the other one: 4 sub-tiles, and 5; of each the last by registers.
template <int PART>
MLA void score_part(float (&s)[SCORES], const u32 (&held)[8][4], u32 queries, u32 tile, int group) {
  const int first = PART ? group * 3 : 4 - group * 4, last = group == PART ? 7 : 8;
  const u64 q = operand(queries + first * Q_SUB, 16, 1024), k = operand(tile + first * SUB, 16, 1024);
  const u64 rest = operand(tile + last * SUB, 16, 1024);
  products_begin();
#pragma unroll
  for (int j = 0; j < 12 + 4 * PART; ++j)
    multiply_scores(s, q + (j / 4 * Q_SUB + j % 4 * 32 >> 4), k + (j / 4 * SUB + j % 4 * 32 >> 4), PART || j != 0);
#pragma unroll
  for (int j = 0; j < 4; ++j) multiply_scores(s, held[PART * 4 + j], rest + j * 2);
  products_commit();
}

// The end of Q, as products want it.
MLA void hold_queries(u32 (&held)[8][4], int row, const u8* from, int group) {
  from += row * 128 + threadIdx.x % 4 * 4;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int chunk = j / 4 % 4 * 2 + j / 2 % 2;
    held[j / 4][j % 4] = *(const u32*)(from + (j / 16 ^ group) * Q_SUB + j % 2 * 1024 + (chunk ^ row % 8) * 16);
  }
}

MLA void write_result(float (&o)[128], const Rows& x, const Work& w, const Result& r, int count, u8* shared) {
  const int group = threadIdx.x >> 7, pair = threadIdx.x & 3;
  // [2, 64]; Q is no longer needed: products with it are over for all warps of a group when one has waited for
  // later ones, which all of them take part in, and the other group was waited for after its last scores.
  float* sums = (float*)shared;
  float sum[2];
#pragma unroll
  for (int y = 0; y < 2; ++y) {
    sum[y] = x.sum[y] + __shfl_xor_sync(~0u, x.sum[y], 1);
    sum[y] += __shfl_xor_sync(~0u, sum[y], 2);
    if (pair == 0) sums[group * ROWS + x.row + 8 * y] = sum[y];
  }
  barrier_arrive(shared_address(shared + SUMMED_AT));
  barrier_wait(shared_address(shared + SUMMED_AT), 0);
  barrier_wait(shared_address(shared + COPIED_AT), 0);
  const bool unknown = *(const int*)(shared + UNKNOWN_AT);
  float by[2];
#pragma unroll
  for (int y = 0; y < 2; ++y) {
    const int mine = w.first + x.row + 8 * y;
    const float total = final_sum(sum[y] + sums[(group ^ 1) * ROWS + x.row + 8 * y], unknown && x.end[y] > w.begin);
    by[y] = r.alone ? inverse(total) : 1.0f;
    if (group == 0 && pair == 0 && mine < w.rows) write_sums(r, mine, x.top[y] - EXPONENT, total);
  }
  rescale(o, by);
  const int number = r.alone ? 2 : 4, stride = 256 * number + number * 8;  // bytes; no two in one bank
  u8* to = shared + RING_AT + (group * ROWS + x.row) * stride + pair * 2 * number;
  if (r.alone) {
#pragma unroll
    for (int j = 0; j < 64; ++j) *(u32*)(to + j % 2 * 8 * stride + j / 2 * 16) = pack(o[2 * j], o[2 * j + 1]);
  } else {
#pragma unroll
    for (int j = 0; j < 64; ++j) *(float2*)(to + j % 2 * 8 * stride + j / 2 * 32) = make_float2(o[2 * j], o[2 * j + 1]);
  }
  shared_written();
  __syncwarp();
  // Half a row goes out at once: this warp's 16.
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, mine = w.first + row;
  if (threadIdx.x % 32 < 16 && mine < w.rows && (r.alone || count > 0)) {
    u8* out = (u8*)r.out + ((i64)mine * RANK + group * 256) * number;
    bulk_store(out, shared_address(shared + RING_AT + (group * ROWS + row) * stride), 256 * number);
  }
}

MLA void compute(const Work& w, const Outputs& to, int count, u8* shared) {
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), other = group ^ 1;  // uniform, the compiler sees
  const u32 base = shared_address(shared), weights = base + WEIGHT_AT;
  const bool twice = weight_parts(w) > 1;
  float* tops = (float*)(shared + TOP_AT);  // [2, 64], after each group's latest tile
  float o[128] = {}, s[SCORES], factor[2];
  u32 held[8][4], p[STEPS][4];
  Rows x;
  x.row = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7);
#pragma unroll
  for (int y = 0; y < 2; ++y) {
    x.end[y] = row_end(w, w.first + x.row + 8 * y);
    x.top[y] = minus_infinity();
    x.sum[y] = 0.0f;
  }
  const u32 ready = base + READY_AT, taken = base + TAKEN_AT;  // of group 0's weights; of group 1's 8 bytes on
  u32 ready_parity = 0, taken_parity = 0;
  auto wait_ready = [&] {
    barrier_wait(ready + 8 * other, ready_parity);
    ready_parity ^= 1;
  };
  // What the other group has weighed: its top counts here, too.
  auto take = [&] {
    wait_ready();
    const float top[2] = {tops[other * ROWS + x.row], tops[other * ROWS + x.row + 8]};
    raise(x, top, factor);
    rescale(o, factor);
  };
  auto give = [&] {
    write_weights(p, x.row, shared);
    barrier_arrive(ready + 8 * group);
  };
  auto give_tops = [&] {
    if (threadIdx.x % 4 == 0)
#pragma unroll
      for (int y = 0; y < 2; ++y) tops[group * ROWS + x.row + 8 * y] = x.top[y];
  };
  auto take_rest = [&](u64 v) {
    barrier_arrive(taken + 8 * other);
    wait_ready();
    add_theirs(o, weights, v);
    products_wait<0>();
    keep(o);
  };
  if (count) {
    const Place q = place(base, 0);
    barrier_wait(q.full + 8 * group, q.parity);  // the other half may be filled anew by now
    hold_queries(held, x.row, shared + RING_AT, group);
    // Before tile 2 comes to where they lay, both groups have released its place.
    barrier_arrive(q.empty + 8 * group);
    if (group == 1) {  // tile -1: no weights
#pragma unroll
      for (int j = 0; j < STEPS * 4; ++j) p[j / 4][j % 4] = 0;
      give_tops();
      give();
    }
  }
  for (int i = group; i < count; i += 2) {
    const Place mine = place(base, i + 1), before = place(base, i ? i : 1);
    barrier_wait(mine.full + 8 * other, mine.parity);
    shared_written();
    score_part<0>(s, held, base, mine.at, group);
    barrier_wait(mine.full + 8 * group, mine.parity);
    shared_written();
    score_part<1>(s, held, base, mine.at, group);
    products_wait<0>();
    keep(s);
    take();
    add_theirs(o, weights, values(before.at, group));
    weigh(s, x, w.begin + i * TOKENS + threadIdx.x % 4 * 2, w.scale, factor);
    products_wait<0>();
    keep(o);
    if (i) {
      if (twice) take_rest(values(before.at, group));
      barrier_arrive(before.empty + 8 * group);
    }
    round_weights(s, p);
    give_tops();
    give();
    rescale(o, factor);
    add_own(o, p, values(mine.at, group));
    if (twice) {
      keep_rest(s, p);
      round_weights(s, p);
      add_own(o, p, values(mine.at, group));
      barrier_wait(taken + 8 * group, taken_parity);
      taken_parity ^= 1;
      give();
    }
    barrier_arrive(mine.empty + 8 * group);
  }
  if (count && (count & 1) == group) {  // the other group's was the last tile
    const u64 v = values(place(base, count).at, group);
    take();
    add_theirs(o, weights, v);
    products_wait<0>();
    keep(o);
    if (twice) take_rest(v);
  }
  write_result(o, x, w, result(to, w), count, shared);
}

MLA void decode(const Query& query, const Cache& c, const Work& w, const Outputs& to, u8* shared) {
  if (threadIdx.x == 0) {
    const u32 base = shared_address(shared);
#pragma unroll
    for (int at = FULL_AT; at < UNKNOWN_AT; at += 8) barrier_init(base + at, at == SUMMED_AT ? 256 : 128);
    barriers_ready();
    *(int*)(shared + UNKNOWN_AT) = 0;
  }
  __syncthreads();
  const int count = (max(0, w.end - w.begin) + TOKENS - 1) / TOKENS;
  if (threadIdx.x >= 256) {
    registers_fewer<40>();
    copy_tiles(query, c, w, count, shared);
  } else {
    registers_more<232>();
    compute(w, to, count, shared);
  }
}
}  // namespace mla
