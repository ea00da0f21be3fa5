// Metal's scalar and vector types as plain C++.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

typedef _Float16 half;

// bfloat: stored as 16 bits, computed in float, rounded to nearest even after each operation.
struct bfloat {
  uint16_t bits;

  bfloat() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> || std::is_same_v<T, half>>>
  constexpr bfloat(T value) : bits(round(float(value))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

  static constexpr uint16_t round(float value) {
    uint32_t u = __builtin_bit_cast(uint32_t, value);
    bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    return is_nan ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
};

// Templates, so that bfloat OP float is still computed in float.
#define MSL_OPERATOR(OP)                                                  \
  template <class T, class = std::enable_if_t<std::is_same_v<T, bfloat>>> \
  inline bfloat operator OP(T a, T b) {                                   \
    return bfloat(float(a) OP float(b));                                  \
  }                                                                       \
  template <class U>                                                      \
  inline bfloat& operator OP## = (bfloat & a, U b) {                      \
    return a = bfloat(float(a) OP float(b));                              \
  }
MSL_OPERATOR(+)
MSL_OPERATOR(-)
MSL_OPERATOR(*)
MSL_OPERATOR(/)
#undef MSL_OPERATOR

namespace metal {

template <class T, int N>
struct vec_elements;
template <class T>
struct vec_elements<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
  };
  vec_elements() {}
};
template <class T>
struct vec_elements<T, 3> {
  union {
    T v[4];
    struct {
      T x, y, z;
    };
  };
  vec_elements() {}
};
template <class T>
struct vec_elements<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
  };
  vec_elements() {}
};

// Components by name or index; no swizzles of several components.
template <class T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : vec_elements<T, N> {
  vec() = default;
  template <class U, class = std::enable_if_t<std::is_convertible_v<U, T>>>
  vec(U all) {
    for (int i = 0; i < N; i++) this->v[i] = T(all);
  }
  template <class... U, class = std::enable_if_t<sizeof...(U) == N && (N > 1)>>
  vec(U... each) {
    T values[] = {T(each)...};
    for (int i = 0; i < N; i++) this->v[i] = values[i];
  }
  template <class U>
  explicit vec(const vec<U, N>& other) {
    for (int i = 0; i < N; i++) this->v[i] = T(other.v[i]);
  }
  T& operator[](int i) { return this->v[i]; }
  const T& operator[](int i) const { return this->v[i]; }
};

template <class S, class T>
using if_scalar = std::enable_if_t<std::is_convertible_v<S, T>>;

#define MSL_OPERATOR(OP)                                      \
  template <class T, int N>                                   \
  inline vec<T, N> operator OP(vec<T, N> a, vec<T, N> b) {    \
    vec<T, N> r;                                              \
    for (int i = 0; i < N; i++) r[i] = a[i] OP b[i];          \
    return r;                                                 \
  }                                                           \
  template <class T, int N, class S, class = if_scalar<S, T>> \
  inline vec<T, N> operator OP(vec<T, N> a, S b) {            \
    return a OP vec<T, N>(b);                                 \
  }                                                           \
  template <class T, int N, class S, class = if_scalar<S, T>> \
  inline vec<T, N> operator OP(S a, vec<T, N> b) {            \
    return vec<T, N>(a) OP b;                                 \
  }                                                           \
  template <class T, int N, class S>                          \
  inline vec<T, N>& operator OP## = (vec<T, N> & a, S b) {    \
    return a = a OP b;                                        \
  }
MSL_OPERATOR(+)
MSL_OPERATOR(-)
MSL_OPERATOR(*)
MSL_OPERATOR(/)
#undef MSL_OPERATOR

template <class T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = T(0);
  for (int i = 0; i < N; i++) sum += a[i] * b[i];
  return sum;
}

}  // namespace metal

#define MSL_VECTORS(T)           \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4;
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(char)
MSL_VECTORS(short)
MSL_VECTORS(int)
MSL_VECTORS(long)
MSL_VECTORS(uchar)
MSL_VECTORS(ushort)
MSL_VECTORS(uint)
MSL_VECTORS(ulong)
#undef MSL_VECTORS

template <class To, class From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
