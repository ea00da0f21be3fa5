  typedef Tile<T, M, RANK, ROPE, SIMDS, ROW_BLOCKS, TOKEN_BLOCKS> Full;
  // The last row tile, if at most half full: half the work.
  typedef Tile<T, M, RANK, ROPE, SIMDS, (ROW_BLOCKS + 1) / 2, TOKEN_BLOCKS> Short;
  threadgroup float score[SIMDS * Full::ROWS * Full::STRIDE];
  threadgroup float rescale[Full::ROWS], inverse[Full::ROWS];
  threadgroup typename Full::P p[Full::ROWS * Full::P_STRIDE];
  const uint3 group = threadgroup_position_in_grid;
  const uint pieces = threadgroups_per_grid.z;
  const Span span =
      span_of(group, pieces, Full::ROWS, q_nope_shape, lengths, starts, piece, scale);
  Cache<T> cache = cache_of<PAGED>(group.y, RANK, latent, latent_shape, latent_strides, k_pe,
                                   k_pe_strides);
  cache.column = PAGED ? block_table_strides[1] : 0;
#define MLA_TILE(TILE)                                                                          \
  Shared<TILE> shared;                                                                          \
  shared.score = score;                                                                         \
  shared.p = p;                                                                                 \
  shared.rescale = rescale;                                                                     \
  shared.inverse = inverse;                                                                     \
  matrix_tile<TILE, PAGED, AHEAD>(                                                              \
      q_nope + group.y * q_nope_strides[0], q_nope_strides, q_pe + group.y * q_pe_strides[0],   \
      q_pe_strides, cache, block_table + (PAGED ? group.y * block_table_strides[0] : 0), span,  \
      own_rows(out, group, pieces, span.rows, RANK),                                            \
      own_rows(lse, group, pieces, span.rows, 1), shared, simdgroup_index_in_threadgroup,       \
      thread_index_in_simdgroup)
  if (ROW_BLOCKS > 1 && span.rows - span.first_row <= Short::ROWS) {
    MLA_TILE(Short);
  } else {
    MLA_TILE(Full);
  }
#undef MLA_TILE
