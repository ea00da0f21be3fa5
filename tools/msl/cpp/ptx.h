// Bodies for what declarations.h declares, as far as the decode kernels use it, for clang's NVPTX back end. A product
// of matrices becomes two multiply-adds a lane: results are meaningless, registers are what counts.
#pragma once

#define PTX inline __attribute__((always_inline))

template <class To, class From>
PTX To as_type(From from) {
  return __builtin_bit_cast(To, from);
}
template <class A>
PTX uint4 make_uint4(A a) {
  return (uint)a;
}

PTX uint lane_of_warp() {
  uint lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
PTX uint warp_of_block() {
  uint warp;
  asm("mov.u32 %0, %%tid.y;" : "=r"(warp));
  return warp;
}

namespace metal {

PTX float max(float a, float b) {
  float r;
  asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
PTX int min(int a, int b) { return a < b ? a : b; }
PTX float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
PTX float exp2(float x) {
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
PTX float log2(float x) {
  float r;
  asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

PTX void threadgroup_barrier(mem_flags) { asm volatile("bar.sync 0;" ::: "memory"); }
PTX void simdgroup_barrier(mem_flags) { asm volatile("" ::: "memory"); }

template <class T>
PTX T simd_shuffle(T value, ushort lane) {
  int r;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(r) : "r"(__builtin_bit_cast(int, value)), "r"((int)lane));
  return __builtin_bit_cast(T, r);
}
template <class T>
PTX T simd_shuffle_xor(T value, ushort mask) {
  int r;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;"
               : "=r"(r)
               : "r"(__builtin_bit_cast(int, value)), "r"((int)mask));
  return __builtin_bit_cast(T, r);
}
template <class T>
PTX T simd_broadcast_first(T value) {
  return simd_shuffle(value, 0);
}
PTX bool simd_any(bool value) {
  int r, given = value;
  asm volatile("{.reg .pred a, b; setp.ne.s32 a, %1, 0; vote.sync.any.pred b, a, -1; selp.s32 %0, 1, 0, b;}"
               : "=r"(r)
               : "r"(given));
  return r;
}

template <class T, int COLUMNS, int ROWS>
PTX vec<T, 2>& simdgroup_matrix<T, COLUMNS, ROWS>::thread_elements() {
  return elements;
}
template <class T, int COLUMNS, int ROWS>
PTX simdgroup_matrix<T, COLUMNS, ROWS> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, COLUMNS, ROWS> m;
  m.elements[0] = m.elements[1] = value;
  return m;
}

// A lane's two elements in one register (halves) or two.
template <class T>
struct Held {
  uint low, high;
  PTX Held(vec<T, 2> v) : low(__builtin_bit_cast(uint, v)), high(low) {}
};
template <>
struct Held<float> {
  uint low, high;
  PTX Held(float2 v) : low(__builtin_bit_cast(uint, v[0])), high(__builtin_bit_cast(uint, v[1])) {}
};
template <class D, class A, class B, class C>
PTX void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                       simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  const Held<A> left(a.elements);
  const Held<B> right(b.elements);
  float x, y;
  asm("{.reg .f32 p, q; mov.b32 p, %1; mov.b32 q, %2; fma.rn.f32 %0, p, q, %3;}"
      : "=f"(x)
      : "r"(left.low), "r"(right.low), "f"(c.elements[0]));
  asm("{.reg .f32 p, q; mov.b32 p, %1; mov.b32 q, %2; fma.rn.f32 %0, p, q, %3;}"
      : "=f"(y)
      : "r"(left.high), "r"(right.high), "f"(c.elements[1]));
  d.elements[0] = x;
  d.elements[1] = y;
}

}  // namespace metal
