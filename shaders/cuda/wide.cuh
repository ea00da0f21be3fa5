// 64 rows (sm_90): two groups of 128 threads compute, a third copies tiles ahead of them. Each of
// the two scores half of the 64 tokens of a tile and owns half of the 512 dims of the output.
// A tile is nine sub-tiles of 64 tokens x 64 dims, swizzled as the products want it.
namespace mla {
static_assert(RANK == 512 && ROPE == 64 && ROWS == 64 && TOKENS == 64, "the layout below");
constexpr int SUB = 8192, TILE_BYTES = 9 * SUB;  // of Q, too
constexpr int TILES_AT = TILE_BYTES, WEIGHT_AT = 3 * TILE_BYTES, TOP_AT = WEIGHT_AT + SUB;
constexpr int FULL_AT = TOP_AT + 512, EMPTY_AT = FULL_AT + 16, UNKNOWN_AT = EMPTY_AT + 16;
static_assert(UNKNOWN_AT + 16 <= SHARED, "shared memory");

// Eight threads copy a row, each of them 16 bytes of each sub-tile. No such row: zeros.
MLA void copy_row(u8* to, Slot from, bool there) {
  const int at = threadIdx.x % 8 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) async_copy(shared_address(to + i * SUB), from.latent + at + i * 64, there ? 16 : 0);
  async_copy(shared_address(to + 8 * SUB), from.pe + at, there ? 16 : 0);
}
// The same where rows are not whole sixteens of bytes.
MLA void gather_row(u8* to, Slot from, i64 dim, i64 pe_dim, bool there) {
  const int at = threadIdx.x % 8 * 8;
#pragma unroll 1
  for (int i = 0; i < 9; ++i) {
    const Bits* eight = i < 8 ? from.latent + (at + i * 64) * dim : from.pe + at * pe_dim;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (there) x = gather_eight(eight, i < 8 ? dim : pe_dim);
    *(uint4*)(to + i * SUB) = x;
  }
}

MLA void copy_queries(const Query& query, const Work& w, u8* to) {
  const bool sixteens = aligned(16, query);
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int mine = w.first + (threadIdx.x - 256) / 8 + 16 * i;
    const bool there = mine < w.rows;
    const int row = there ? mine : 0, head = row / w.q_len, q = row - head * w.q_len;
    Slot from;
    from.latent = query.nope + head * query.nope_head + q * query.nope_query;
    from.pe = query.pe + head * query.pe_head + q * query.pe_query;
    if (sixteens)
      copy_row(to + i * 2048, from, there);
    else
      gather_row(to + i * 2048, from, query.nope_dim, query.pe_dim, there);
  }
}

MLA void copy_tiles(const Query& query, const Cache& c, const Work& w, int count, u8* shared) {
  const u32 full = shared_address(shared + FULL_AT), empty = full + 16;
  const int row = (threadIdx.x - 256) / 8;
  const u32 mine = row * 128 + (threadIdx.x % 8 ^ row % 8) * 16;
  const bool sixteens = aligned(16, c);
  int* unknown = (int*)(shared + UNKNOWN_AT);
  int id[4];  // of the next tile
#pragma unroll
  for (int j = 0; j < 4; ++j) id[j] = block_id(c, w, w.begin + row + 16 * j);
  if (count) copy_queries(query, w, shared + mine);
  for (int i = 0; i < count; ++i) {
    const int stage = i & 1, at = w.begin + i * 64 + row;
    barrier_wait(empty + 8 * stage, (i >> 1 & 1) ^ 1);
    u8* to = shared + TILES_AT + stage * TILE_BYTES + mine;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = at + 16 * j;
      const bool there = token < w.end;  // else zeros: weight 0 times NaN is NaN
      const Slot from = slot(c, w, known_block(w, id[j], unknown), there ? token : w.begin);
      if (sixteens)
        copy_row(to + j * 2048, from, there);
      else
        gather_row(to + j * 2048, from, c.dim, c.pe_dim, there);
    }
    async_commit();
#pragma unroll
    for (int j = 0; j < 4; ++j) id[j] = block_id(c, w, at + 64 + 16 * j);
    async_wait<0>();
    shared_written();
    barrier_arrive(full + 8 * stage);
  }
}

// Weights of this thread's 2 rows as far as they are 16-bit numbers; the rest of them stays in s.
MLA void write_weights(float (&s)[16], int row, int half, u8* shared) {
#pragma unroll
  for (int y = 0; y < 2; ++y)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* e = s + j * 4 + y * 2;
      const int at = (row + 8 * y) * 128 + ((half * 4 + j) ^ row % 8) * 16 + threadIdx.x % 4 * 4;
      const u32 rounded = pack(e[0], e[1]);
      *(u32*)(shared + WEIGHT_AT + at) = rounded;
      e[0] -= lower(rounded);
      e[1] -= upper(rounded);
    }
  shared_written();
}

MLA void add_values(float (&o)[128], u32 tile, int half, u8* shared) {
  const u64 p = operand(shared_address(shared + WEIGHT_AT), 16, 1024);
  const u64 v = operand(tile + half * 4 * SUB, SUB, 1024);
  keep(o);
  products_begin();
#pragma unroll
  for (int j = 0; j < 4; ++j) multiply_values(o, p + j * 2, v + j * 128);
  products_end();
  keep(o);
}

MLA void compute(const Work& w, const Result& r, int count, u8* shared) {
  const int half = threadIdx.x >> 7, lane = threadIdx.x & 31, pair = lane & 3;
  const int row = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);  // this thread's rows: it and + 8
  const u32 tiles = shared_address(shared + TILES_AT);
  const u32 full = shared_address(shared + FULL_AT), empty = full + 16;
  const u64 q = operand(shared_address(shared), 16, 1024);
  float* tops = (float*)(shared + TOP_AT);  // [2, 64]
  float o[128] = {}, top[2], sum[2] = {0.0f, 0.0f};
  int end[2];
#pragma unroll
  for (int y = 0; y < 2; ++y) {
    top[y] = minus_infinity();
    end[y] = row_end(w, w.first + row + 8 * y);
  }
  for (int i = 0; i < count; ++i) {
    const u32 tile = tiles + (i & 1) * TILE_BYTES;
    barrier_wait(full + 8 * (i & 1), i >> 1 & 1);
    float s[16];  // [4 blocks of 8 tokens, 2 rows, 2 tokens]
    const u64 k = operand(tile + half * 4096, 16, 1024);
    products_begin();
#pragma unroll
    for (int j = 0; j < 36; ++j) {
      const u64 at = (j / 4 * SUB + j % 4 * 32) >> 4;
      multiply_scores(s, q + at, k + at, j != 0);
    }
    products_end();
    keep(s);
    const int token = w.begin + i * 64 + half * 32 + pair * 2;
    float larger[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int y = j / 2 % 2;
      s[j] = token + j / 4 * 8 + j % 2 < end[y] ? s[j] * w.scale : minus_infinity();
      larger[y] = fmaxf(larger[y], s[j]);
    }
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      larger[y] = fmaxf(larger[y], __shfl_xor_sync(~0u, larger[y], 1));
      larger[y] = fmaxf(larger[y], __shfl_xor_sync(~0u, larger[y], 2));
      if (pair == 0) tops[half * 64 + row + 8 * y] = larger[y];
    }
    compute_sync();
    float factor[2];
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      larger[y] = fmaxf(top[y], fmaxf(larger[y], tops[(half ^ 1) * 64 + row + 8 * y]));
      const float base = larger[y] == minus_infinity() ? 0.0f : larger[y];  // no token seen yet
      factor[y] = exp2_fast(top[y] - base);
      top[y] = larger[y];
      sum[y] *= factor[y];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* e = s + j * 4 + y * 2;
        e[0] = exp2_fast(e[0] - base + EXPONENT);
        e[1] = exp2_fast(e[1] - base + EXPONENT);
        sum[y] += e[0] + e[1];
      }
    }
    write_weights(s, row, half, shared);
    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {  // seldom, after the first tiles
#pragma unroll
      for (int j = 0; j < 128; ++j) o[j] *= factor[j / 2 % 2];
    }
    compute_sync();
    add_values(o, tile, half, shared);
    if (weight_parts(w) > 1) {
      compute_sync();  // all have read the first part
      write_weights(s, row, half, shared);
      compute_sync();
      add_values(o, tile, half, shared);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * (i & 1));
  }
#pragma unroll
  for (int y = 0; y < 2; ++y) {
    sum[y] += __shfl_xor_sync(~0u, sum[y], 1);
    sum[y] += __shfl_xor_sync(~0u, sum[y], 2);
  }
  compute_sync();
  if (pair == 0)
#pragma unroll
    for (int y = 0; y < 2; ++y) tops[half * 64 + row + 8 * y] = sum[y];
  compute_sync();
  const bool unknown = *(const int*)(shared + UNKNOWN_AT);
  const bool wanted = r.alone || count > 0;
#pragma unroll
  for (int y = 0; y < 2; ++y) {
    const int mine = w.first + row + 8 * y;
    if (mine >= w.rows) continue;
    const float total = final_sum(sum[y] + tops[(half ^ 1) * 64 + row + 8 * y], unknown && end[y] > w.begin);
    const float by = inverse(total);
    if (half == 0 && pair == 0) r.lse[mine] = log_sum(top[y] - EXPONENT, total);
    const i64 to = (i64)mine * RANK + half * 256 + pair * 2;
    if (wanted)
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const float x0 = o[j * 4 + y * 2] * by, x1 = o[j * 4 + y * 2 + 1] * by;
        if (r.alone)
          *(u32*)(r.out + to + j * 8) = pack(x0, x1);
        else
          __stcg((float2*)((float*)r.out + to + j * 8), make_float2(x0, x1));
      }
  }
}

MLA void decode(const Query& query, const Cache& c, const Work& w, const Result& r, u8* shared) {
  if (threadIdx.x == 0) {
    const u32 full = shared_address(shared + FULL_AT);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      barrier_init(full + 8 * i, 128);
      barrier_init(full + 16 + 8 * i, 8);
    }
    barriers_ready();
    *(int*)(shared + UNKNOWN_AT) = 0;
  }
  __syncthreads();
  const int count = max(0, w.end - w.begin + 63) / 64;
  if (threadIdx.x >= 256) {
    registers_fewer<56>();
    copy_tiles(query, c, w, count, shared);
  } else {
    registers_more<224>();
    compute(w, r, count, shared);
  }
}
}  // namespace mla
