  constexpr int QUERIES = GROUPS * ROWS * (RANK + ROPE), SUMS = SIMDS * RANK;
  threadgroup vec<float, 4> shared[(QUERIES > SUMS ? QUERIES : SUMS) / 4];
  threadgroup float tops[SIMDS * ROWS], weights[SIMDS * ROWS];
  const uint3 group = threadgroup_position_in_grid;
  const uint pieces = threadgroups_per_grid.z;
  const Span span =
      span_of(group, pieces, GROUPS * ROWS, q_nope_shape, lengths, starts, piece, scale);
  Cache<T> cache = cache_of<PAGED>(group.y, RANK, latent, latent_shape, latent_strides, k_pe,
                                   k_pe_strides);
  cache.column = PAGED ? block_table_strides[1] : 0;
  vector_tile<RANK, ROPE, SIMDS, GROUPS, ROWS, STEP, PAGED>(
      q_nope + group.y * q_nope_strides[0], q_nope_strides, q_pe + group.y * q_pe_strides[0],
      q_pe_strides, cache, block_table + (PAGED ? group.y * block_table_strides[0] : 0), span,
      own_rows(out, group, pieces, span.rows, RANK), own_rows(lse, group, pieces, span.rows, 1),
      (threadgroup float*)shared, tops, weights, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
