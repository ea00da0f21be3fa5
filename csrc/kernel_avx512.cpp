// x86-64 with AVX-512 F, BW, VL and DQ. The bf16 dot instruction (VDPBF16PS) is left alone: one every 2.2 clocks, it
// was 1.8-1.9 times slower than converting to float on Emerald Rapids (2026-11-29), and rounding P to bf16 missed our
// bounds.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "compile this file with -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq"
#endif
#define MLA_ISA avx512
#define MLA_NAME "avx512"
#define MLA_AVX2
#define MLA_AVX512
#define MLA_WIDTH 16
#define MLA_REGISTERS 32
#include "attend.h"
#endif
