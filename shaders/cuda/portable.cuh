// Any GPU with 16-bit tensor cores (sm_80 and later): eight warps copy a tile while they compute
// the one before. TOKENS is 32: eight threads copy a token.
namespace mla {
static_assert(TOKENS == 32 && TILES_AT + 2 * TILE_BYTES <= SHARED, "tile and shared memory");

MLA void copy_tile(const Cache& c, const Work& w, int token, int block, bool sixteens, u8* tile) {
  const int t = threadIdx.x / 8;
  const bool there = token < w.end;  // else zeros: weight 0 times NaN is NaN
  const Slot from = slot(c, w, block, there ? token : w.begin);
  for (int i = threadIdx.x % 8; i < (RANK + ROPE) / 8; i += 8) {
    const bool rope = i >= RANK / 8;
    const int at8 = rope ? i * 8 - RANK : i * 8;
    const i64 dim = rope ? c.pe_dim : c.dim;
    const Bits* eight = (rope ? from.pe : from.latent) + at8 * dim;
    u8* to = tile + (rope ? pe_at(t) : latent_at(t)) + at8 * 2;
    if (sixteens)
      async_copy(shared_address(to), eight, there ? 16 : 0);
    else
      *(uint4*)to = there ? gather_eight(eight, dim) : make_uint4(0, 0, 0, 0);
  }
}

MLA void decode(const Query& query, const Cache& c, const Work& w, const Outputs& to, u8* shared) {
  const bool sixteens = aligned(16, c);
  int* unknown = (int*)(shared + UNKNOWN_AT);
  if (threadIdx.x == 0) *unknown = 0;
  __syncthreads();
  Sums s;
  begin(s, query, w, shared);
  u8* tiles = shared + TILES_AT;
  int mine = w.begin + threadIdx.x / 8, id = block_id(c, w, mine);  // of the next tile
  for (int at = w.begin - TOKENS, stage = 1; at < w.end; at += TOKENS, stage ^= 1) {
    if (at + TOKENS < w.end) {
      u8* next = tiles + (stage ^ 1) * TILE_BYTES;
      copy_tile(c, w, mine, known_block(w, id, unknown), sixteens, next);
      mine += TOKENS;
      id = block_id(c, w, mine);
    }
    async_commit();
    if (at < w.begin) continue;
    async_wait<1>();
    __syncthreads();  // the tile is there for all
    const u32 tile = shared_address(tiles + stage * TILE_BYTES);
    add_scores(s, tile, shared);
    __syncthreads();
    add_weights(s, w, at, shared);
    __syncthreads();
    add_values(s, w, tile, shared);
    __syncthreads();  // all have read the tile, weights and factors
  }
  write(s, w, result(to, w), shared, [] { __syncthreads(); });
}
}  // namespace mla
