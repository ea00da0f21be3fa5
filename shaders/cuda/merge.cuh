// Second pass: the pieces of a row, weighted by their sums. A unit is 64 dims of a row; a block has
// 16 teams of 16 lanes. Where units are few, up to 16 teams share one, and each takes every
// groups-th piece; where they are many, a team takes two, for a few loads hide little.
namespace mla {
constexpr int UNITS = RANK / 64;  // of a row
constexpr int AHEAD = 8;          // loads before the first weight is known
constexpr int LOOKS = 8;          // of a lane at largest scores, before it needs one

// A piece without tokens has weight 0, and whatever lies in its output. NaN stays.
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

// Partial answers of a sequence: part [room, rows, RANK]; largest score and sum of weights [rows, room].
// `pieces` of `room` are there.
struct Parts {
  const float* part;
  const float2* sums;
  int rows, room, pieces;
};

// How many teams share a unit: 1 << log. Divisions take long.
struct Sharing {
  int log;
  MLA int groups() const { return 1 << log; }
  MLA int member() const { return (threadIdx.x >> 4) & groups() - 1; }
  MLA int unit() const { return blockIdx.x * (16 >> log) + (threadIdx.x >> 4 >> log); }
};

// Largest scores of a row's first pieces, a piece a lane. All loads start at once: nothing else hides them.
MLA void load_tops(float (&tops)[LOOKS], const float2* sums, int pieces) {
#pragma unroll
  for (int i = 0; i < LOOKS; ++i) {
    const int piece = (threadIdx.x & 15) + 16 * i;
    tops[i] = piece < pieces ? sums[piece].x : minus_infinity();
  }
}
// Of all pieces, to all 16 lanes; 0 if none saw a token.
MLA float largest(const float (&tops)[LOOKS], const float2* sums, int pieces) {
  float top = minus_infinity();
#pragma unroll
  for (int i = 0; i < LOOKS; ++i) top = fmaxf(top, tops[i]);
  for (int piece = (threadIdx.x & 15) + 16 * LOOKS; piece < pieces; piece += 16) top = fmaxf(top, sums[piece].x);
#pragma unroll
  for (int step = 8; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  return top == minus_infinity() ? 0.0f : top;
}

// Adds up every groups-th piece, from `member` on, of `EACH` units of a row; returns the sum of weights.
template <int EACH>
MLA float add_pieces(float4 (&sum)[EACH], const Parts& p, int row, int dim, Sharing sharing, float& top) {
  constexpr int COUNT = AHEAD / EACH;
  const int member = sharing.member();
  const float* from = p.part + (i64)row * RANK + dim;
  const float2* sums = p.sums + (i64)row * p.room;
  const i64 next = (i64)p.rows * RANK;
  float tops[LOOKS];
  load_tops(tops, sums, p.pieces);
  float4 x[COUNT][EACH];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int piece = member + (i << sharing.log);
#pragma unroll
    for (int j = 0; j < EACH; ++j)
      x[i][j] = piece < p.pieces ? __ldcg((const float4*)(from + piece * next + j * 64)) : float4();
  }
  top = largest(tops, sums, p.pieces);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int piece = member + (i << sharing.log);
    if (piece >= p.pieces) break;
    const float2 of_piece = sums[piece];  // again: now they are near
    const float weight = exp2_fast(of_piece.x - top);
    total += weight * of_piece.y;
#pragma unroll
    for (int j = 0; j < EACH; ++j) add_piece(sum[j], x[i][j], weight);
  }
  for (int piece = member + (COUNT << sharing.log); piece < p.pieces; piece += sharing.groups()) {
    const float2 of_piece = sums[piece];
    const float weight = exp2_fast(of_piece.x - top);
    total += weight * of_piece.y;
#pragma unroll
    for (int j = 0; j < EACH; ++j) add_piece(sum[j], __ldcg((const float4*)(from + piece * next + j * 64)), weight);
  }
  return total;
}

MLA void add(float4& sum, float& total, float4 other, float other_total) {
  total += other_total;
  sum.x += other.x;
  sum.y += other.y;
  sum.z += other.z;
  sum.w += other.w;
}

// The first member of a unit's teams adds up what all found: two teams of a warp by shuffles, the
// others through shared memory. False: another one does.
MLA bool joined(float4& sum, float& total, Sharing sharing) {
  __shared__ float4 sums[8][16];
  __shared__ float totals[8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 15;
  float4 other;
  other.x = __shfl_xor_sync(~0u, sum.x, 16);
  other.y = __shfl_xor_sync(~0u, sum.y, 16);
  other.z = __shfl_xor_sync(~0u, sum.z, 16);
  other.w = __shfl_xor_sync(~0u, sum.w, 16);
  add(sum, total, other, __shfl_xor_sync(~0u, total, 16));
  sums[warp][lane] = sum;  // both teams write the same
  if (lane == 0) totals[warp] = total;
  __syncthreads();
  if (sharing.member()) return false;
#pragma unroll
  for (int k = 1; k < 8; ++k)
    if (2 * k < sharing.groups()) add(sum, total, sums[warp + k][lane], totals[warp + k]);
  return true;
}

template <int EACH>
MLA void merge_units(const Parts& p, Sharing sharing, Bits* out, float* lse) {
  const int unit = sharing.unit() * EACH, lane = threadIdx.x & 15;
  if ((blockIdx.x * 16 >> sharing.log) * EACH >= p.rows * UNITS) return;  // the whole block
  const int row = min(unit / UNITS, p.rows - 1), dim = unit % UNITS * 64 + lane * 4;
  float4 sum[EACH] = {};
  float top, total = add_pieces(sum, p, row, dim, sharing, top);
  if (sharing.log && !joined(sum[0], total, sharing)) return;
  if (unit >= p.rows * UNITS) return;
  const float by = inverse(total);
#pragma unroll
  for (int j = 0; j < EACH; ++j)
    write_four(out + (i64)row * RANK + dim + j * 64,
               make_float4(sum[j].x * by, sum[j].y * by, sum[j].z * by, sum[j].w * by));
  if (lse && dim == 0) lse[row] = log_sum(top, total);
}

// How the back end wants the work shared shows in the number of blocks. `info`: as in base.cuh; where
// sequences differ, their pieces' numbers follow the pieces. `lse`: none where it isn't wanted.
template <typename Shape, typename Numbers>
MLA void merge(const void* part, const Shape& part_shape,  // [batch, room, rows, RANK + 4], as Result has it
               const int* info, const Numbers& numbers, void* out, float* lse) {
  const int b = blockIdx.y;
  Parts p;
  p.room = part_shape[1];
  p.rows = part_shape[2];
  p.pieces = numbers[9] > 0 ? info[4 * numbers[9] + b] : p.room;
  p.part = (const float*)part + (i64)b * p.room * p.rows * (RANK + 4);
  p.sums = (const float2*)(p.part + p.room * p.rows * RANK);
  Bits* to = (Bits*)out + (i64)b * p.rows * RANK;
  float* to_lse = lse ? lse + (i64)b * p.rows : lse;
  const int units = p.rows * UNITS, teams = gridDim.x * 16;
  Sharing sharing;
  sharing.log = 0;
  if (teams >= units) {  // as many blocks as there are; fewer where a sequence has few pieces
    while (sharing.log < 4 && (units << sharing.log) + 15 >> 4 < (int)gridDim.x && sharing.groups() < p.pieces)
      ++sharing.log;
    merge_units<1>(p, sharing, to, to_lse);
  } else {
    merge_units<2>(p, sharing, to, to_lse);
  }
}
}  // namespace mla
