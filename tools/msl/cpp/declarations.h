// Declarations only, with real address spaces, for clang -fsyntax-only. The overloads must be those of the
// Metal specification: one too many and a wrong call passes.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

// A vector type; `T4(a, b, c, d)` is a macro, because clang has no such constructors in C++.
#define VECTORS(T)                                    \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4))); \
  template <class A>                                  \
  T##2 make_##T##2(A);                                \
  template <class A, class B>                         \
  T##2 make_##T##2(A, B);                             \
  template <class A>                                  \
  T##3 make_##T##3(A);                                \
  template <class A, class B, class C>                \
  T##3 make_##T##3(A, B, C);                          \
  template <class A>                                  \
  T##4 make_##T##4(A);                                \
  template <class A, class B, class C, class D>       \
  T##4 make_##T##4(A, B, C, D);
VECTORS(float)
VECTORS(half)
VECTORS(bfloat)
VECTORS(char)
VECTORS(short)
VECTORS(int)
VECTORS(long)
VECTORS(uchar)
VECTORS(ushort)
VECTORS(uint)
VECTORS(ulong)
#undef VECTORS

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f
#define M_LN2_F 0.693147180559945309417f
#define M_LOG2E_F 1.44269504088896340736f

template <class To, class From>
To as_type(From);

// What a cast of pointers becomes: Metal's own may not change the address space.
template <class Pointer>
struct space_of;
#define SPACE(NUMBER, WORD)               \
  template <class T>                      \
  struct space_of<WORD T*> {              \
    static constexpr int number = NUMBER; \
  };
SPACE(0, thread)
SPACE(1, device)
SPACE(2, constant)
SPACE(3, threadgroup)
#undef SPACE
template <class To, class From>
METAL_FUNC To msl_cast(From from) {
  static_assert(space_of<To>::number == space_of<From>::number, "a cast to another address space");
  return (To)from;
}

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define COMMON(T)   \
  T min(T, T);      \
  T max(T, T);      \
  T clamp(T, T, T); \
  T select(T, T, bool);
COMMON(float)
COMMON(half)
COMMON(float2)
COMMON(float4)
COMMON(half2)
COMMON(half4)
COMMON(short)
COMMON(ushort)
COMMON(int)
COMMON(uint)
COMMON(long)
COMMON(ulong)
#undef COMMON

#define FLOATING(T) \
  T exp(T);         \
  T exp2(T);        \
  T log(T);         \
  T log2(T);        \
  T sqrt(T);        \
  T rsqrt(T);       \
  T floor(T);       \
  T ceil(T);        \
  T trunc(T);       \
  T round(T);       \
  T rint(T);        \
  T fabs(T);        \
  T abs(T);         \
  T sin(T);         \
  T cos(T);         \
  T tanh(T);        \
  T pow(T, T);      \
  T fma(T, T, T);
FLOATING(float)
FLOATING(half)
FLOATING(float2)
FLOATING(float4)
FLOATING(half2)
FLOATING(half4)
#undef FLOATING
int abs(int);
float ldexp(float, int);
half ldexp(half, int);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
bool isnan(half);
bool isinf(half);
bool isfinite(half);
float dot(float2, float2);
float dot(float3, float3);
float dot(float4, float4);
half dot(half2, half2);
half dot(half4, half4);

namespace fast {
float exp(float);
float exp2(float);
float log(float);
float log2(float);
float sqrt(float);
float rsqrt(float);
float sin(float);
float cos(float);
float tanh(float);
}  // namespace fast
namespace precise = fast;

template <class T>
T simd_sum(T);
template <class T>
T simd_product(T);
template <class T>
T simd_max(T);
template <class T>
T simd_min(T);
bool simd_any(bool);
bool simd_all(bool);
template <class T>
T simd_shuffle(T, ushort);
template <class T>
T simd_shuffle_xor(T, ushort);
template <class T>
T simd_shuffle_down(T, ushort);
template <class T>
T simd_shuffle_up(T, ushort);
template <class T>
T simd_broadcast(T, ushort);
template <class T>
T simd_broadcast_first(T);

template <class T, int COLUMNS, int ROWS>
struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int COLUMNS, int ROWS>
simdgroup_matrix<T, COLUMNS, ROWS> make_filled_simdgroup_matrix(T);

// The memory's element type is the matrix's own: no conversion while loading or storing.
#define MATRIX_MEMORY(SPACE)                                                                                      \
  template <class T>                                                                                              \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const SPACE T*, ulong row_length = 8, ulong2 origin = ulong2{}, \
                      bool transpose = false);                                                                    \
  template <class T>                                                                                              \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, SPACE T*, ulong row_length = 8, ulong2 origin = ulong2{},       \
                       bool transpose = false);
MATRIX_MEMORY(device)
MATRIX_MEMORY(threadgroup)
#undef MATRIX_MEMORY

template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>,
                                   simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);

}  // namespace metal
using metal::simdgroup_bfloat8x8;
using metal::simdgroup_float8x8;
using metal::simdgroup_half8x8;

#define float2(...) make_float2(__VA_ARGS__)
#define float3(...) make_float3(__VA_ARGS__)
#define float4(...) make_float4(__VA_ARGS__)
#define half2(...) make_half2(__VA_ARGS__)
#define half4(...) make_half4(__VA_ARGS__)
#define int2(...) make_int2(__VA_ARGS__)
#define int4(...) make_int4(__VA_ARGS__)
#define uint2(...) make_uint2(__VA_ARGS__)
#define uint3(...) make_uint3(__VA_ARGS__)
#define uint4(...) make_uint4(__VA_ARGS__)
#define ushort2(...) make_ushort2(__VA_ARGS__)
#define ulong2(...) make_ulong2(__VA_ARGS__)
