// From MLX's arrays and their strides to a kernel's own terms; included last.
namespace mla {
template <typename Strides>
MLA void run(const void* q_nope, const Strides& q_nope_strides, const void* q_pe, const Strides& q_pe_strides,
             const void* latent, const Strides& latent_strides,
             const void* beside,  // paged: the block table; dense: k_pe
             const Strides& beside_strides, const int* info, const Strides& info_strides, void* out, float* lse) {
  extern __shared__ __align__(1024) u8 shared[];
  if (info_strides[9] > 0 && listed_piece() >= info_strides[9]) return;  // the grid has a few more
  const Work w = work(info, info_strides);
  const int b = w.sequence;
  Query query = {};
  query.nope = (const Bits*)q_nope + b * q_nope_strides[0];
  query.nope_head = q_nope_strides[1];
  query.nope_query = q_nope_strides[2];
  query.nope_dim = q_nope_strides[3];
  if (ROPE) {
    query.pe = (const Bits*)q_pe + b * q_pe_strides[0];
    query.pe_head = q_pe_strides[1];
    query.pe_query = q_pe_strides[2];
    query.pe_dim = q_pe_strides[3];
  }
  Cache cache = {};
  if (PAGED) {
    cache.latent = (const Bits*)latent;
    cache.block = latent_strides[0];
    cache.token = cache.pe_token = latent_strides[1];
    cache.dim = cache.pe_dim = latent_strides[2];
    cache.pe = cache.latent + RANK * cache.dim;
    cache.table = (const int*)beside + b * beside_strides[0];
    cache.table_column = beside_strides[1];
  } else {
    cache.token = latent_strides[2];
    cache.dim = latent_strides[3];
    cache.latent = (const Bits*)latent + b * latent_strides[0] + w.start * cache.token;
    if (ROPE) {
      cache.pe_token = beside_strides[2];
      cache.pe_dim = beside_strides[3];
      cache.pe = (const Bits*)beside + b * beside_strides[0] + w.start * cache.pe_token;
    }
  }
  const Outputs to = {(Bits*)out, lse};
  decode(query, cache, w, to, shared);
}
}  // namespace mla
