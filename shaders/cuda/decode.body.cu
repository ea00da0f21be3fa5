  extern __shared__ __align__(1024) unsigned char shared[];
  const int b = blockIdx.y;
  mla::Query query = {};
  query.nope = (const mla::Bits*)q_nope + b * q_nope_strides[0];
  query.nope_head = q_nope_strides[1];
  query.nope_query = q_nope_strides[2];
  query.nope_dim = q_nope_strides[3];
#if ROPE
  query.pe = (const mla::Bits*)q_pe + b * q_pe_strides[0];
  query.pe_head = q_pe_strides[1];
  query.pe_query = q_pe_strides[2];
  query.pe_dim = q_pe_strides[3];
#endif
  mla::Cache cache = {};
#if PAGED
  cache.latent = (const mla::Bits*)latent;
  cache.block = latent_strides[0];
  cache.token = cache.pe_token = latent_strides[1];
  cache.dim = cache.pe_dim = latent_strides[2];
  cache.pe = cache.latent + RANK * cache.dim;
  cache.table = block_table + b * block_table_strides[0];
  cache.table_column = block_table_strides[1];
#else
  const mla::i64 first = info[6 + 2 * b];
  cache.token = latent_strides[2];
  cache.dim = latent_strides[3];
  cache.latent = (const mla::Bits*)latent + b * latent_strides[0] + first * cache.token;
#if ROPE
  cache.pe_token = k_pe_strides[2];
  cache.pe_dim = k_pe_strides[3];
  cache.pe = (const mla::Bits*)k_pe + b * k_pe_strides[0] + first * cache.pe_token;
#endif
#endif
  const mla::Work work = mla::work(info);
  mla::decode(query, cache, work, mla::result((mla::Bits*)out, lse, work), shared);
