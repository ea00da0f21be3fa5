// Few rows, sm_90 and later: eight warps compute, a ninth copies tiles ahead of them.
// Defined by the back end: STAGES, the tiles in shared memory.
namespace mla {
static_assert(TILES_AT + STAGES * TILE_BYTES <= SHARED, "shared memory");
constexpr int EMPTY_AT = 8 * STAGES;  // barriers: STAGES full ones, STAGES empty ones

// Tokens from `token` on: there are none, and weight 0 times NaN is NaN.
MLA_RARE clear_tokens(u8* tile, int token) {
  const int lane = threadIdx.x & 31;
  for (; token < TOKENS; ++token) {
    for (int c = lane; c < LATENT_ROW / 16; c += 32)
      *(uint4*)(tile + latent_at(token) + c * 16) = make_uint4(0, 0, 0, 0);
    if (!PAGED)
      for (int c = lane; c < PE_ROW / 16; c += 32) *(uint4*)(tile + pe_at(token) + c * 16) = make_uint4(0, 0, 0, 0);
  }
}

// Copies a group of a tile, `count` tokens: as one piece where they follow each other.
MLA void copy_group(const Cache& c, Slot from, u32 tile, int group, int count, u32 full) {
  const u64 policy = read_once();
  const bool latent_piece = c.token * 2 == LATENT_ROW, pe_piece = c.pe_token * 2 == PE_ROW;
  for (int i = 0; i < (latent_piece ? min(1, count) : count); ++i)
    bulk_copy(tile + group * LATENT_GROUP + i * LATENT_ROW, from.latent + i * c.token,
              latent_piece ? count * LATENT_ROW : LATENT_ROW, full, policy);
  if (!PAGED && ROPE)
    for (int i = 0; i < (pe_piece ? min(1, count) : count); ++i)
      bulk_copy(tile + PE_AT + group * PE_GROUP + i * PE_ROW, from.pe + i * c.pe_token,
                pe_piece ? count * PE_ROW : PE_ROW, full, policy);
}

// The same where tokens are not whole sixteens of bytes; lane n holds where group n begins.
MLA_RARE gather_tile(Cache c, Slot from, u8* tile, int count) {
  const int lane = threadIdx.x & 31;
  for (int t = 0; t < count; ++t) {
    const Bits* latent = (const Bits*)__shfl_sync(~0u, (u64)from.latent, t / GROUP);
    const Bits* pe = (const Bits*)__shfl_sync(~0u, (u64)from.pe, t / GROUP);
    for (int d = lane; d < RANK; d += 32) ((Bits*)(tile + latent_at(t)))[d] = latent[t % GROUP * c.token + d * c.dim];
    for (int d = lane; d < ROPE; d += 32) ((Bits*)(tile + pe_at(t)))[d] = pe[t % GROUP * c.pe_token + d * c.pe_dim];
  }
}

// `next`: the block of group `lane` of the first four tiles.
MLA void copy_tiles(const Cache& c, const Work& w, int count, int next, u8* shared) {
  const int lane = threadIdx.x & 31;
  const u32 full = shared_address(shared), empty = full + EMPTY_AT;
  const bool sixteens = aligned(16, c);
  int* unknown = (int*)(shared + UNKNOWN_AT);
  // Blocks of the groups of four tiles, a group a lane, looked up four tiles ahead.
  int blocks = 0;
  int stage = 0;
  u32 parity = 1;
  for (int i = 0; i < count; ++i) {
    if (i % 4 == 0) {
      blocks = known_block(w, next, unknown);
      next = block_id(c, w, w.begin + (i + 4) * TOKENS + lane * GROUP);
    }
    const int at = w.begin + i * TOKENS, tokens = min(TOKENS, w.end - at);
    const int block = __shfl_sync(~0u, blocks, i % 4 * 8 + lane % 8);
    const Slot from = slot(c, w, block, at + lane % 8 * GROUP);
    u8* tile = shared + TILES_AT + stage * TILE_BYTES;
    barrier_wait(empty + 8 * stage, parity);
    if (tokens < TOKENS) clear_tokens(tile, tokens);
    if (!sixteens) gather_tile(c, from, tile, tokens);
    const u32 barrier = full + 8 * stage;
    if (lane == 0 && sixteens) barrier_expect(barrier, tokens * (RANK + ROPE) * 2);
    __syncwarp();
    const int mine = min(GROUP, tokens - lane * GROUP);
    if (sixteens && lane < 8) copy_group(c, from, shared_address(tile), lane, mine, barrier);
    barrier_arrive(barrier);  // each lane for what it wrote itself
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

MLA void compute(const Query& query, const Work& w, const Outputs& to, int count, u8* shared) {
  const u32 full = shared_address(shared), empty = full + EMPTY_AT;
  Sums s;
  begin(s, query, w, shared);
  int stage = 0;
  u32 parity = 0;
  for (int i = 0; i < count; ++i) {
    const u32 tile = full + TILES_AT + stage * TILE_BYTES;
    barrier_wait(full + 8 * stage, parity);
    add_scores(s, tile, shared);
    compute_sync();
    add_weights(s, w, w.begin + i * TOKENS, shared);
    compute_sync();
    add_values(s, w, tile, shared);
    barrier_arrive(empty + 8 * stage);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  write(s, w, result(to, w), shared, [] { compute_sync(); });
}

MLA void decode(const Query& query, const Cache& c, const Work& w, const Outputs& to, u8* shared) {
  if (threadIdx.x == 256) {
    const u32 full = shared_address(shared);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + 8 * i, 32);
      barrier_init(full + EMPTY_AT + 8 * i, 256);
    }
    barriers_ready();
    *(int*)(shared + UNKNOWN_AT) = 0;
  }
  const int count = max(0, w.end - w.begin + TOKENS - 1) / TOKENS;
  const bool copies = threadIdx.x >= 256;
  const int next = copies ? block_id(c, w, w.begin + (threadIdx.x - 256) * GROUP) : 0;  // while others get ready
  __syncthreads();
  if (copies)
    copy_tiles(c, w, count, next, shared);
  else
    compute(query, w, to, count, shared);
}
}  // namespace mla
