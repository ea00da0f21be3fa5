// The Metal standard library, as far as our kernels use it. A name that is missing here is a compile
// error: add it with the meaning that the Metal specification gives it, and to declarations.h.
#pragma once

#include "runtime.h"

#define METAL_FUNC inline __attribute__((always_inline))
#define M_PI_F 3.14159265358979323846f
#define M_LN2_F 0.693147180559945309417f
#define M_LOG2E_F 1.44269504088896340736f
// Where the caller is: the last, defaulted parameter of anything that synchronises. Two calls of one name
// are told apart by it.
#define MSL_SITE int site = msl::site(std::source_location::current())

namespace metal {

using std::conditional_t;
using std::enable_if_t;
using std::is_same_v;
using std::numeric_limits;

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = msl::DEVICE_MEMORY,
  mem_threadgroup = msl::THREADGROUP_MEMORY,
};
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
inline void threadgroup_barrier(mem_flags flags, MSL_SITE) { msl::threadgroup_barrier(uint(flags), site); }
inline void simdgroup_barrier(mem_flags flags, MSL_SITE) { msl::simdgroup_barrier(uint(flags), site); }

// --- arithmetic

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
  std::common_type_t<A, B> x = a, y = b;
  return y < x ? y : x;
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
  std::common_type_t<A, B> x = a, y = b;
  return x < y ? y : x;
}
template <class T>
inline T clamp(T value, T low, T high) {
  return min(max(value, low), high);
}
template <class T>
inline T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}

#define MSL_FUNCTION(F)                         \
  inline float F(float x) { return std::F(x); } \
  inline half F(half x) { return half(std::F(float(x))); }
MSL_FUNCTION(exp)
MSL_FUNCTION(log)
MSL_FUNCTION(log2)
MSL_FUNCTION(sqrt)
MSL_FUNCTION(floor)
MSL_FUNCTION(ceil)
MSL_FUNCTION(trunc)
MSL_FUNCTION(round)
MSL_FUNCTION(rint)
MSL_FUNCTION(fabs)
MSL_FUNCTION(sin)
MSL_FUNCTION(cos)
MSL_FUNCTION(tanh)
#undef MSL_FUNCTION
inline float exp2(float x) {
  msl::count(msl::EXP2S);
  return std::exp2(x);
}
inline half exp2(half x) { return half(exp2(float(x))); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float pow(float x, float y) { return std::pow(x, y); }
inline float ldexp(float x, int e) { return std::ldexp(x, e); }
inline float fma(float a, float b, float c) {
  msl::count(msl::FMAS);
  return std::fma(a, b, c);
}
inline half fma(half a, half b, half c) { return half(fma(float(a), float(b), float(c))); }
template <class T, int N>
inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = fma(a[i], b[i], c[i]);
  return r;
}
inline float abs(float x) { return std::fabs(x); }
inline int abs(int x) { return x < 0 ? -x : x; }
using std::isfinite;
using std::isinf;
using std::isnan;

// Exact here; on a GPU fast:: is less accurate.
namespace fast {
using metal::cos, metal::exp, metal::exp2, metal::log, metal::log2, metal::rsqrt, metal::sin, metal::sqrt, metal::tanh;
}
namespace precise = fast;

// --- simdgroup operations. Shuffles read lanes that are not there as NaN.

#define MSL_REDUCTION(NAME, A_AND_B)                                                  \
  template <class T>                                                                  \
  inline T NAME(T value, MSL_SITE) {                                                  \
    return msl::simd_reduce(value, site, #NAME, [](T a, T b) { return T(A_AND_B); }); \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a* b)
MSL_REDUCTION(simd_max, a < b ? b : a)
MSL_REDUCTION(simd_min, b < a ? b : a)
#undef MSL_REDUCTION
inline bool simd_any(bool value, MSL_SITE) {
  return msl::simd_reduce(value, site, "simd_any", [](bool a, bool b) { return a || b; });
}
inline bool simd_all(bool value, MSL_SITE) {
  return msl::simd_reduce(value, site, "simd_all", [](bool a, bool b) { return a && b; });
}

// SOURCE: the lane to read, of `lane` and the function's own argument.
#define MSL_EXCHANGE(NAME, SOURCE)                                                       \
  template <class T>                                                                     \
  inline T NAME(T value, ushort argument, MSL_SITE) {                                    \
    return msl::simd_exchange(value, argument, site, #NAME, [](int lane, int argument) { \
      (void)lane;                                                                        \
      return SOURCE;                                                                     \
    });                                                                                  \
  }
MSL_EXCHANGE(simd_shuffle, argument)
MSL_EXCHANGE(simd_broadcast, argument)
MSL_EXCHANGE(simd_shuffle_xor, lane ^ argument)
MSL_EXCHANGE(simd_shuffle_down, lane + argument)
MSL_EXCHANGE(simd_shuffle_up, lane - argument)
#undef MSL_EXCHANGE
template <class T>
inline T simd_broadcast_first(T value, MSL_SITE) {
  return msl::simd_exchange(value, 0, site, "simd_broadcast_first", [](int, int first) { return first; });
}

// --- simdgroup_matrix: 8x8, two neighbouring columns a lane. Apple does not document which; this is
// the map that MLX's own kernels rest on.

template <class T, int COLUMNS, int ROWS>
struct simdgroup_matrix {
  static_assert(COLUMNS == 8 && ROWS == 8);
  alignas(2 * sizeof(T)) T element[2];

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (int k = 0; k < 2; k++) element[k] = my_row() == my_column() + k ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return *reinterpret_cast<vec<T, 2>*>(element); }
  static int my_row() { return msl::matrix_row(msl::group->current->lane); }
  static int my_column() { return msl::matrix_column(msl::group->current->lane); }
};

template <class T, int COLUMNS, int ROWS>
inline simdgroup_matrix<T, COLUMNS, ROWS> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, COLUMNS, ROWS> m;
  m.element[0] = m.element[1] = value;
  return m;
}

// All lanes must come here together, as for any simdgroup operation. Only checked where it is worth the time.
inline void simd_converge(int site, const char* name) {
#ifdef MSL_CHECK
  msl::expect_full_simdgroup(site);
  (void)msl::simd_operation<char, char>(0, site, name, [](msl::Slot*, msl::Slot*, uint32_t) {});
#else
  (void)site, (void)name;
#endif
}

template <class T, class Memory>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const Memory* from, ulong row_length = 8,
                           ulong2 origin = ulong2(0), bool transpose = false, MSL_SITE) {
  simd_converge(site, "simdgroup_load");
  from += origin.y * row_length + origin.x;
  for (int k = 0; k < 2; k++) {
    int row = m.my_row(), column = m.my_column() + k;
    m.element[k] = T(transpose ? from[column * row_length + row] : from[row * row_length + column]);
  }
}
template <class T, class Memory>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> m, Memory* to, ulong row_length = 8, ulong2 origin = ulong2(0),
                            bool transpose = false, MSL_SITE) {
  simd_converge(site, "simdgroup_store");
  to += origin.y * row_length + origin.x;
  for (int k = 0; k < 2; k++) {
    int row = m.my_row(), column = m.my_column() + k;
    (transpose ? to[column * row_length + row] : to[row * row_length + column]) = Memory(m.element[k]);
  }
}

// d = a * b + c, accumulated in float.
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                          simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, MSL_SITE) {
  msl::MatrixElements mine;
  for (int k = 0; k < 2; k++) {
    mine.a[k] = float(a.element[k]);
    mine.b[k] = float(b.element[k]);
    mine.c[k] = float(c.element[k]);
  }
  msl::matrix_multiply(mine, site);
  for (int k = 0; k < 2; k++) d.element[k] = D(mine.c[k]);
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                               MSL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), site);
}

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

}  // namespace metal
using metal::simdgroup_bfloat8x8, metal::simdgroup_float8x8, metal::simdgroup_half8x8;
