// Second pass: the pieces of a row, weighted by their sums. A unit is 64 dims of a row; a block has
// 16 teams of 16 lanes. Where units are few, up to 16 teams share one, and each takes every
// groups-th piece; where they are many, a team takes several of a row, for a few loads hide little.
namespace mla {
constexpr int UNITS = RANK / 64;  // of a row
constexpr int AHEAD = 8;          // loads before the first weight is known

// A piece without tokens has weight 0, and whatever lies in its output. NaN stays.
MLA float weight_of(float lse, float top) { return exp2f((lse - top) * 1.4426950408889634f); }
MLA void add_piece(float4& sum, float4 x, float weight) {
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

// Partial answers of a sequence: part [room, rows, RANK], part_lse [rows, room]; `pieces` of `room`
// are there.
struct Parts {
  const float *part, *part_lse;
  int rows, room, pieces;
};

// Adds up every groups-th piece, from `member` on, of `EACH` units of a row; returns their weights.
template <int EACH>
MLA float add_pieces(float4 (&sum)[EACH], const Parts& p, int row, int dim, int member, int groups, float& top) {
  constexpr int COUNT = AHEAD / EACH;
  const int lane = threadIdx.x & 15;
  const float *from = p.part + (i64)row * RANK + dim, *from_lse = p.part_lse + (i64)row * p.room;
  float4 x[COUNT][EACH];
  float x_lse[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int piece = member + i * groups;
    const bool there = piece < p.pieces;
    x_lse[i] = there ? from_lse[piece] : minus_infinity();
#pragma unroll
    for (int j = 0; j < EACH; ++j)
      x[i][j] = there ? __ldcg((const float4*)(from + (i64)piece * p.rows * RANK + j * 64)) : float4();
  }
  top = minus_infinity();
#pragma unroll 4
  for (int piece = lane; piece < p.pieces; piece += 16) top = fmaxf(top, from_lse[piece]);
#pragma unroll
  for (int step = 8; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (top == minus_infinity()) top = 0.0f;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float weight = weight_of(x_lse[i], top);
    total += weight;
#pragma unroll
    for (int j = 0; j < EACH; ++j) add_piece(sum[j], x[i][j], weight);
  }
  for (int piece = member + COUNT * groups; piece < p.pieces; piece += groups) {
    const float weight = weight_of(from_lse[piece], top);
    total += weight;
#pragma unroll
    for (int j = 0; j < EACH; ++j)
      add_piece(sum[j], __ldcg((const float4*)(from + (i64)piece * p.rows * RANK + j * 64)), weight);
  }
  return total;
}

// The first member of a unit's teams adds up what all found. False: another one does.
MLA bool joined(float4& sum, float& total, int team, int member, int groups) {
  __shared__ float4 sums[16][16];
  __shared__ float totals[16];
  const int lane = threadIdx.x & 15;
  sums[team][lane] = sum;
  if (lane == 0) totals[team] = total;
  __syncthreads();
  if (member) return false;
#pragma unroll
  for (int k = 1; k < 16; ++k) {
    if (k >= groups) break;
    const float4 other = sums[team + k][lane];
    total += totals[team + k];
    sum.x += other.x;
    sum.y += other.y;
    sum.z += other.z;
    sum.w += other.w;
  }
  return true;
}

template <int EACH>
MLA void merge_units(const Parts& p, int groups, Bits* out, float* lse) {
  const int team = threadIdx.x >> 4, lane = threadIdx.x & 15, member = team % groups;
  const int unit = (blockIdx.x * (16 / groups) + team / groups) * EACH;
  const int row = min(unit / UNITS, p.rows - 1), dim = unit % UNITS * 64 + lane * 4;
  float4 sum[EACH] = {};
  float top, total = add_pieces(sum, p, row, dim, member, groups, top);
  if (groups > 1 && !joined(sum[0], total, team, member, groups)) return;
  if (unit >= p.rows * UNITS) return;
  const float by = inverse(total);
#pragma unroll
  for (int j = 0; j < EACH; ++j)
    write_four(out + (i64)row * RANK + dim + j * 64,
               make_float4(sum[j].x * by, sum[j].y * by, sum[j].z * by, sum[j].w * by));
  if (dim == 0) lse[row] = log_sum(top * 1.4426950408889634f, total);
}

// How the back end wants the work shared shows in the number of blocks. `info`: as in base.cuh; where
// sequences differ, their pieces' numbers follow the pieces.
template <typename Shape, typename Numbers>
MLA void merge(const void* part, const float* part_lse, const Shape& lse_shape,  // [batch, rows, room]
               const int* info, const Numbers& numbers, void* out, float* lse) {
  const int b = blockIdx.y;
  Parts p;
  p.rows = lse_shape[1];
  p.room = lse_shape[2];
  p.pieces = numbers[9] > 0 ? info[4 * numbers[9] + b] : p.room;
  const i64 first = (i64)b * p.room * p.rows;
  p.part = (const float*)part + first * RANK;
  p.part_lse = part_lse + first;
  Bits* to = (Bits*)out + (i64)b * p.rows * RANK;
  float* to_lse = lse + (i64)b * p.rows;
  const int units = p.rows * UNITS, teams = gridDim.x * 16;
  if (teams * 2 < units) return merge_units<4>(p, 1, to, to_lse);
  if (teams < units) return merge_units<2>(p, 1, to, to_lse);
  int groups = 1;
  while (groups < 16 && (units * groups + 15) / 16 < (int)gridDim.x) groups *= 2;
  merge_units<1>(p, groups, to, to_lse);
}
}  // namespace mla
