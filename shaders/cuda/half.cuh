// Shared by the kernels for 16-bit numbers: small helpers, and how to read what is not aligned.
namespace mla {
// Weights are 2^EXPONENT times too large in float16, which can't hold the small ones of a long
// context: together they count.
constexpr float EXPONENT = HALF[0] == 'f' ? 15.0f : 0.0f;
// Weights rounded to bfloat16 leave rows of a short sequence off by up to 2.8e-3, where rounding the
// output costs 1.9e-3; over many tokens such errors cancel. So where there are few, what was rounded
// off is multiplied as well, as a second part.
constexpr int FEW_TOKENS = 2048;
MLA int weight_parts(const Work& w) { return HALF[0] == 'b' && w.tokens <= FEW_TOKENS ? 2 : 1; }
// A bfloat16, in the upper half of a word or the lower one, as a float.
MLA float upper(u32 two) { return __uint_as_float(two & 0xffff0000u); }
MLA float lower(u32 two) { return __uint_as_float(two << 16); }

MLA u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Whether so many bytes can be moved at once. Strides are run-time numbers: a cache may be any view
// of a buffer.
MLA bool aligned(int bytes, const void* p, i64 stride, i64 dim) {
  return dim == 1 && (((u64)p | 2 * (u64)stride) & (bytes - 1)) == 0;
}
MLA bool aligned(int bytes, const Query& q) {
  return aligned(bytes, q.nope, q.nope_head | q.nope_query, q.nope_dim) &&
         (!ROPE || aligned(bytes, q.pe, q.pe_head | q.pe_query, q.pe_dim));
}
MLA bool aligned(int bytes, const Cache& c) {
  return aligned(bytes, c.latent, c.token | (PAGED ? c.block : 0), c.dim) &&
         (PAGED || !ROPE || aligned(bytes, c.pe, c.pe_token, c.pe_dim));
}
// Numbers of a row where they can't be.
MLA u32 gather_two(const Bits* p, i64 dim) { return p[0] | (u32)p[dim] << 16; }
MLA uint4 gather_eight(const Bits* p, i64 dim) {
  return make_uint4(gather_two(p, dim), gather_two(p + 2 * dim, dim), gather_two(p + 4 * dim, dim),
                    gather_two(p + 6 * dim, dim));
}
}  // namespace mla
