// The eight tile registers of AMX, here simply "registers": 16 rows of 64 bytes each. With MLA_AMX_EMULATED they live
// in memory, so that sanitizers and CPUs without AMX can run the kernel.
#pragma once
#include "tokens.h"

namespace mla::MLA_ISA {
namespace {

constexpr int kSide = 16;              // rows of a register, and 32-bit words of a row
constexpr int kWords = kSide * kSide;  // 32-bit words of a register
constexpr int kRowBytes = 4 * kSide;   // also the stride of a register stored without gaps
constexpr int kPairs = 2 * kSide;      // bf16 of a row: what one multiplication sums over
constexpr uint32_t kUpper = 0xffff0000u;

#if defined(MLA_AMX_EMULATED)

struct Registers {
  uint32_t words[8][kSide][kSide];
  bool configured;
};
static thread_local Registers registers;

inline Registers& usable_registers() {
  if (!registers.configured) __builtin_trap();  // what the hardware does, too
  return registers;
}

// Numbers below the normal ones count as zero, going in and coming out.
MLA_INLINE Vec flushed(Vec x) { return Vec(Bits(x) & (Bits((Bits(x) & 0x7f800000u) != 0) | 0x80000000u)); }

inline void amx_begin() { registers.configured = true; }
inline void amx_end() { registers = {}; }
template <int R>
void amx_zero() {
  __builtin_memset(usable_registers().words[R], 0, sizeof(registers.words[R]));
}
template <int R>
void amx_load(const void* from, int64_t stride) {
  for (int i = 0; i < kSide; ++i)
    __builtin_memcpy(usable_registers().words[R][i], static_cast<const char*>(from) + i * stride, kRowBytes);
}
template <int R>
void amx_store(void* to, int64_t stride) {
  for (int i = 0; i < kSide; ++i)
    __builtin_memcpy(static_cast<char*>(to) + i * stride, usable_registers().words[R][i], kRowBytes);
}
template <int C, int A, int B>
void amx_multiply() {
  Registers& r = usable_registers();
  for (int m = 0; m < kSide; ++m) {
    Vec even{}, odd{};
    for (int k = 0; k < kSide; ++k) {
      const Bits a = r.words[A][m][k] - Bits{};
      const Two b = widen(reinterpret_cast<const bf16*>(r.words[B][k]));
      even = flushed(even + flushed(flushed(Vec(a << 16)) * flushed(b.x)));
      odd = flushed(odd + flushed(flushed(Vec(a & kUpper)) * flushed(b.y)));
    }
    float* c = reinterpret_cast<float*>(r.words[C][m]);
    store(c, flushed(flushed(load(c)) + flushed(even + odd)));
  }
}

#else

// As the CPU wants to be told: palette 1, all registers whole.
struct Layout {
  uint8_t palette = 1, unused[15] = {};
  uint16_t row_bytes[16] = {kRowBytes, kRowBytes, kRowBytes, kRowBytes, kRowBytes, kRowBytes, kRowBytes, kRowBytes};
  uint8_t rows[16] = {kSide, kSide, kSide, kSide, kSide, kSide, kSide, kSide};
};

// Instructions and not the compilers' intrinsics: g++ 12 may move a store behind its tile load, and wants literal
// register numbers.
MLA_INLINE void amx_begin() {
  const Layout layout;
  __asm__ volatile("ldtilecfg %0" ::"m"(layout));
}
MLA_INLINE void amx_end() { __asm__ volatile("tilerelease" ::: "memory"); }
template <int R>
MLA_INLINE void amx_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(R));
}
template <int R>
MLA_INLINE void amx_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
}
template <int R>
MLA_INLINE void amx_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(R) : "memory");
}
// C[m][n] += A[m][2k] * B[k][2n] + A[m][2k + 1] * B[k][2n + 1] over k: A and B hold bf16, C float.
template <int C, int A, int B>
MLA_INLINE void amx_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

#if defined(__clang__)
#define MLA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MLA_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Bits{__VA_ARGS__})
#endif

// 16 rows of 16 words. Interleaving row i with row i + 8 rotates the bits of (row, column) by one; four times swap
// them.
inline void transpose(const uint32_t* const* from, uint32_t* to) {
  Bits v[kSide], w[kSide];
  MLA_UNROLL(16)
  for (int i = 0; i < kSide; ++i) v[i] = *reinterpret_cast<const BitsLoose*>(from[i]);
  MLA_UNROLL(4)
  for (int stage = 0; stage < 4; ++stage) {
    MLA_UNROLL(8)
    for (int i = 0; i < kSide / 2; ++i) {
      w[2 * i] = MLA_SHUFFLE(v[i], v[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      w[2 * i + 1] = MLA_SHUFFLE(v[i], v[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    MLA_UNROLL(16)
    for (int i = 0; i < kSide; ++i) v[i] = w[i];
  }
  MLA_UNROLL(16)
  for (int i = 0; i < kSide; ++i) *reinterpret_cast<BitsLoose*>(to + i * kSide) = v[i];
}

// Two rows of upper halves (of floats, so bf16) as one row of pairs.
MLA_INLINE Bits paired(Bits x, Bits y) { return (x >> 16) | (y & kUpper); }

}  // namespace
}  // namespace mla::MLA_ISA
