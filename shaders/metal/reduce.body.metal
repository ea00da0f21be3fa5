  // Merges the pieces of one row: a simdgroup takes 128 dimensions, a lane four. Pieces without
  // tokens have LSE -inf (natural) and no output.
  const int rows = threadgroups_per_grid.x, pieces = part_lse_shape[1];
  const uint3 group = threadgroup_position_in_grid;
  const int lane = thread_index_in_simdgroup;
  const int dim = simdgroup_index_in_threadgroup * 128 + lane * 4;
  const long row = long(group.y) * rows + group.x, first = long(group.y) * pieces * rows + group.x;
  float top = -INFINITY;
  for (int i = lane; i < pieces; i += 32) {
    top = max(top, part_lse[first + i * rows]);
  }
  top = simd_max(top);
  const float base = top > -INFINITY ? top : 0.0f;
  float total = 0.0f, sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int i = 0; i < pieces; i += 32) {
    const float mine = i + lane < pieces ? exp(part_lse[first + (i + lane) * rows] - base) : 0.0f;
    total += mine;
    for (int j = 0; j < min(32, pieces - i); j++) {
      const float weight = simd_shuffle(mine, j);
      if (weight > 0.0f) {
        const vec<float, 4> from =
            *(const device vec<float, 4>*)(part + (first + (i + j) * rows) * RANK + dim);
        for (int e = 0; e < 4; e++) {
          sum[e] = fma(weight, from[e], sum[e]);
        }
      }
    }
  }
  total = simd_sum(total);
  vec<T, 4> merged;
  for (int e = 0; e < 4; e++) {
    merged[e] = T(total == 0.0f ? 0.0f : sum[e] / total);
  }
  *(device vec<T, 4>*)(out + row * RANK + dim) = merged;
  if (dim == 0) {
    lse[row] = total == 0.0f ? -INFINITY : base + log(total);
  }
