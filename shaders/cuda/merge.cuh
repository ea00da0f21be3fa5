// Second pass: the pieces of a row, weighted by their sums. A unit is 64 dims of a row. A block has
// 16 teams of 16 lanes; so many of them share a unit that as many blocks as there are have work,
// and each takes every groups-th piece.
namespace mla {
constexpr int UNITS = RANK / 64;  // of a row
constexpr int AHEAD = 8;          // pieces that are loaded before the first weight is known

// A piece without tokens has weight 0, and whatever lies in its output. NaN stays.
MLA void add_piece(float4& sum, float& total, float4 x, float lse, float top) {
  const float weight = exp2f((lse - top) * 1.4426950408889634f);
  total += weight;
  if (weight == 0.0f) return;
  sum.x = fmaf(weight, x.x, sum.x);
  sum.y = fmaf(weight, x.y, sum.y);
  sum.z = fmaf(weight, x.z, sum.z);
  sum.w = fmaf(weight, x.w, sum.w);
}
MLA void write_four(float* to, float4 x) { *(float4*)to = x; }
#ifdef HALF
MLA void write_four(unsigned short* to, float4 x) { *(uint2*)to = make_uint2(pack(x.x, x.y), pack(x.z, x.w)); }
#endif

// Teams that share a unit: 1, 2, 4, 8 or 16.
MLA int groups_of(int units) {
  int groups = 1;
  while (groups < 16 && (units * groups + 15) / 16 < (int)gridDim.x) groups *= 2;
  return groups;
}

MLA void merge(const float* part,      // [batch, pieces, rows, RANK]
               const float* part_lse,  // [batch, pieces, rows]
               int rows, int pieces, Bits* out, float* lse) {
  const int groups = groups_of(rows * UNITS);
  const int team = threadIdx.x >> 4, lane = threadIdx.x & 15, member = team % groups;
  const int unit = blockIdx.x * (16 / groups) + team / groups;
  const int row = min(unit / UNITS, rows - 1), dim = unit % UNITS * 64 + lane * 4;
  const i64 first = (i64)blockIdx.y * pieces * rows + row;
  const float* from = part + first * RANK + dim;
  const float* from_lse = part_lse + first;
  float4 x[AHEAD];
  float x_lse[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    const int p = member + i * groups;
    x[i] = p < pieces ? __ldcg((const float4*)(from + (i64)p * rows * RANK)) : float4();
    x_lse[i] = p < pieces ? from_lse[p * rows] : minus_infinity();
  }
  float top = minus_infinity();
  for (int p = lane; p < pieces; p += 16) top = fmaxf(top, from_lse[p * rows]);
#pragma unroll
  for (int step = 8; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (top == minus_infinity()) top = 0.0f;
  float4 sum = float4();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) add_piece(sum, total, x[i], x_lse[i], top);
  for (int p = member + AHEAD * groups; p < pieces; p += groups)
    add_piece(sum, total, __ldcg((const float4*)(from + (i64)p * rows * RANK)), from_lse[p * rows], top);
  __shared__ float4 sums[16][16];
  __shared__ float totals[16];
  if (groups > 1) {  // the first member adds up
    sums[team][lane] = sum;
    if (lane == 0) totals[team] = total;
    __syncthreads();
    if (member) return;
    for (int k = 1; k < groups; ++k) {
      const float4 other = sums[team + k][lane];
      total += totals[team + k];
      sum.x += other.x;
      sum.y += other.y;
      sum.z += other.z;
      sum.w += other.w;
    }
  }
  if (unit >= rows * UNITS) return;
  const i64 to = (i64)blockIdx.y * rows + row;
  const float by = inverse(total);
  write_four(out + to * RANK + dim, make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by));
  if (dim == 0) lse[to] = log_sum(top * 1.4426950408889634f, total);
}
}  // namespace mla
