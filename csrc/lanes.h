// Registers of W floats and the conversions between them and the cache's dtypes, for one instruction set.
// The including file defines MLA_ISA (a namespace), MLA_WIDTH (floats a register) and MLA_REGISTERS, and where
// intrinsics are wanted MLA_AVX2 (with MLA_AVX512 on top) or MLA_NEON.
#pragma once
#if defined(MLA_AVX2)
#include <immintrin.h>
#elif defined(MLA_NEON)
#include <arm_neon.h>
#endif

#include "kernel.h"

#define MLA_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define MLA_UNROLL(n) MLA_PRAGMA(unroll n)
#else
#define MLA_UNROLL(n) MLA_PRAGMA(GCC unroll n)
#endif
#define MLA_INLINE_LAMBDA __attribute__((always_inline))

namespace mla::MLA_ISA {
namespace {

constexpr int W = MLA_WIDTH;
constexpr int kBlock = MLA_REGISTERS == 32 ? 16 : 8;  // tokens of a score block: one accumulator each
typedef float Vec __attribute__((vector_size(4 * W)));
typedef float VecLoose __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef uint32_t BitsLoose __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef float Four __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

MLA_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecLoose*>(p); }
MLA_INLINE void store(float* p, Vec v) { *reinterpret_cast<VecLoose*>(p) = v; }
MLA_INLINE Vec all(float x) { return x - Vec{}; }
MLA_INLINE int least(int a, int b) { return a < b ? a : b; }

// 2W numbers of a row as float. A pair of bf16 is split by one shift and one mask, so x holds the even dims and y the
// odd ones: accumulators keep that order and narrow() undoes it.
struct Two {
  Vec x, y;
};
MLA_INLINE Two widen(const float* in) { return {load(in), load(in + W)}; }
MLA_INLINE Two widen(const bf16* in) {
  Bits pairs = *reinterpret_cast<const BitsLoose*>(in);
#if defined(MLA_AVX512)
  // Read once: g++ 12 reads the same memory for either half. One row of 32K: 4-6 %; 16, 20 and 128 heads: the same time
  // (Xeon of the Skylake kind, 2026-11-30).
  asm("" : "+v"(pairs));
#endif
  return {Vec(pairs << 16), Vec(pairs & 0xffff0000u)};
}
MLA_INLINE Two widen(const f16* in) {
#if defined(MLA_AVX512)
  const __m256i* half = reinterpret_cast<const __m256i*>(in);
  return {Vec(_mm512_cvtph_ps(_mm256_loadu_si256(half))), Vec(_mm512_cvtph_ps(_mm256_loadu_si256(half + 1)))};
#elif defined(MLA_AVX2)
  const __m128i* half = reinterpret_cast<const __m128i*>(in);
  return {Vec(_mm256_cvtph_ps(_mm_loadu_si128(half))), Vec(_mm256_cvtph_ps(_mm_loadu_si128(half + 1)))};
#elif defined(MLA_NEON)
  uint16x8_t halves = vld1q_u16(reinterpret_cast<const uint16_t*>(in));
  return {Vec(vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves)))),
          Vec(vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(halves))))};
#else
  Vec half[2];
  for (int j = 0; j < 2; ++j) {
    Bits h;
    for (int i = 0; i < W; ++i) h[i] = in[j * W + i].bits;
    Bits body = (h & 0x7fff) << 13;
    Bits special = Bits(body >= 0x0f800000) & 0x7f800000;                        // infinity and NaN
    half[j] = Vec(Bits(Vec(body) * 0x1p112f) | special | ((h & 0x8000) << 16));  // right for subnormals too
  }
  return {half[0], half[1]};
#endif
}

// The upper half of each result is the bf16, rounded to nearest even.
MLA_INLINE Bits rounded(Vec v) {
  Bits u = Bits(v), nan = Bits(v != v);
  return ((u + 0x7fff + ((u >> 16) & 1)) & ~nan) | (nan & 0x7fc00000);
}

#if !defined(MLA_AVX2) && !defined(MLA_NEON)
inline uint16_t half_bits(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint32_t sign = u >> 16 & 0x8000, body = u & 0x7fffffff;
  if (body > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (body >= 0x477ff000) return uint16_t(sign | 0x7c00);  // from 65520 on
  if (body < 0x38800000) {                                 // subnormal: let the adder round at 2^-24
    float magnitude;
    __builtin_memcpy(&magnitude, &body, 4);
    magnitude += 0.5f;
    __builtin_memcpy(&u, &magnitude, 4);
    return uint16_t(sign | (u - 0x3f000000));
  }
  return uint16_t(sign | ((body + 0xfff + (body >> 13 & 1) - 0x38000000) >> 13));
}
#endif

MLA_INLINE void narrow(float* out, Two v) {
  store(out, v.x);
  store(out + W, v.y);
}
MLA_INLINE void narrow(bf16* out, Two v) {
  *reinterpret_cast<BitsLoose*>(out) = (rounded(v.x) >> 16) | (rounded(v.y) & 0xffff0000u);
}
MLA_INLINE void narrow(f16* out, Two v) {
#if defined(MLA_AVX512)
  __m256i* half = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(half, _mm512_cvtps_ph(__m512(v.x), _MM_FROUND_TO_NEAREST_INT));
  _mm256_storeu_si256(half + 1, _mm512_cvtps_ph(__m512(v.y), _MM_FROUND_TO_NEAREST_INT));
#elif defined(MLA_AVX2)
  __m128i* half = reinterpret_cast<__m128i*>(out);
  _mm_storeu_si128(half, _mm256_cvtps_ph(__m256(v.x), _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(half + 1, _mm256_cvtps_ph(__m256(v.y), _MM_FROUND_TO_NEAREST_INT));
#elif defined(MLA_NEON)
  uint16x4_t low = vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(v.x)));
  uint16x4_t high = vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(v.y)));
  vst1q_u16(reinterpret_cast<uint16_t*>(out), vcombine_u16(low, high));
#else
  for (int i = 0; i < W; ++i) {
    out[i].bits = half_bits(v.x[i]);
    out[W + i].bits = half_bits(v.y[i]);
  }
#endif
}

// The sums of four registers.
MLA_INLINE Four sums(Vec a, Vec b, Vec c, Vec d) {
#if defined(MLA_AVX512)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(__m512(a), __m512(b)), _mm512_unpackhi_ps(__m512(a), __m512(b)));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(__m512(c), __m512(d)), _mm512_unpackhi_ps(__m512(c), __m512(d)));
  __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  __m512 z = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
  return Four(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(MLA_AVX2)
  __m256 half = _mm256_hadd_ps(_mm256_hadd_ps(__m256(a), __m256(b)), _mm256_hadd_ps(__m256(c), __m256(d)));
  return Four(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(MLA_NEON)
  float32x4_t ab = vpaddq_f32(float32x4_t(a), float32x4_t(b)), cd = vpaddq_f32(float32x4_t(c), float32x4_t(d));
  return Four(vpaddq_f32(ab, cd));
#else
  Four r{};
  for (int i = 0; i < W; ++i) r += Four{a[i], b[i], c[i], d[i]};
  return r;
#endif
}

#if defined(MLA_AVX512)
// Eight numbers; the other lanes hold minus infinity.
MLA_INLINE Vec eight(Four a, Four b) {
  return Vec(_mm512_insertf32x8(_mm512_set1_ps(-__builtin_inff()), _mm256_set_m128(__m128(b), __m128(a)), 0));
}
MLA_INLINE float largest(Vec v) { return _mm512_reduce_max_ps(__m512(v)); }
#endif

MLA_INLINE Vec exp2_of_nonpositive(Vec x) {
  Ints gone = x < -126.0f;
  x = gone ? all(-126.0f) : x;
  Vec shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);  // f in [-0.5, 0.5]
  Vec p = all(1.54035304e-4f);
  p = p * f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  return Vec((Bits(p) + (Bits(shifted) << 23)) & ~Bits(gone));
}

}  // namespace
}  // namespace mla::MLA_ISA
