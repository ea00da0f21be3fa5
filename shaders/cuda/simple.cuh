// Any case in float32, and nothing clever: a warp takes a row, a lane every 32nd dim.
namespace mla {
constexpr int AHEAD = 4;  // tokens that are loaded before the first is used

MLA float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

MLA void decode(const Query& query, const Cache& c, const Work& w, const Outputs& to, u8*) {
  const int lane = threadIdx.x & 31, mine = w.first + (threadIdx.x >> 5);
  if (mine >= w.rows) return;
  const int head = mine / w.q_len, end = row_end(w, mine);
  const Bits* nope = query.nope + head * query.nope_head + mine % w.q_len * query.nope_query;
  const Bits* pe = query.pe + head * query.pe_head + mine % w.q_len * query.pe_query;
  float q[RANK / 32], q_pe[ROPE / 32 + 1] = {}, o[RANK / 32] = {};
  float top = minus_infinity(), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < RANK / 32; ++i) q[i] = nope[(lane + 32 * i) * query.nope_dim];
#pragma unroll
  for (int i = 0; i < ROPE / 32; ++i) q_pe[i] = pe[(lane + 32 * i) * query.pe_dim];
  int unknown = 0;
  for (int at = w.begin; at < end; at += AHEAD) {
    float latent[AHEAD][RANK / 32], score[AHEAD];
    float larger = top;
#pragma unroll
    for (int t = 0; t < AHEAD; ++t) {
      const int token = min(at + t, end - 1);  // a token again is better than one that isn't there
      const Slot from = slot(c, w, known_block(w, block_id(c, w, token), &unknown), token);
      float partial = 0.0f;
#pragma unroll
      for (int i = 0; i < RANK / 32; ++i) {
        latent[t][i] = from.latent[(lane + 32 * i) * c.dim];
        partial = fmaf(q[i], latent[t][i], partial);
      }
#pragma unroll
      for (int i = 0; i < ROPE / 32; ++i) partial = fmaf(q_pe[i], from.pe[(lane + 32 * i) * c.pe_dim], partial);
      score[t] = warp_sum(partial) * w.scale;
      if (at + t >= end) score[t] = minus_infinity();
      larger = fmaxf(larger, score[t]);
    }
    const float factor = exp2f(top - larger);
    sum *= factor;
#pragma unroll
    for (int i = 0; i < RANK / 32; ++i) o[i] *= factor;
#pragma unroll
    for (int t = 0; t < AHEAD; ++t) {
      const float weight = exp2f(score[t] - larger);
      sum += weight;
#pragma unroll
      for (int i = 0; i < RANK / 32; ++i) o[i] = fmaf(weight, latent[t][i], o[i]);
    }
    top = larger;
  }
  sum = final_sum(sum, __any_sync(~0u, unknown));
  const Result r = result(to, w);
  const float by = r.alone ? inverse(sum) : 1.0f;
#pragma unroll
  for (int i = 0; i < RANK / 32; ++i) r.out[(i64)mine * RANK + lane + 32 * i] = o[i] * by;
  if (lane == 0) write_sums(r, mine, top, sum);
}
}  // namespace mla
