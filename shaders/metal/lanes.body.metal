  // One simdgroup: which elements of an 8x8 matrix does each lane hold? seen [32, 2]: 8 * row +
  // column.
  const uint lane = thread_index_in_simdgroup;
  threadgroup float numbers[64];
  numbers[lane] = lane;
  numbers[lane + 32] = lane + 32;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 m;
  simdgroup_load(m, numbers, 8);
  seen[2 * lane] = m.thread_elements()[0] + zero[0];
  seen[2 * lane + 1] = m.thread_elements()[1] + zero[0];
