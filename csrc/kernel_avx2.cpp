// x86-64 with AVX2, FMA and F16C: Haswell, Zen and later.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#endif
#define MLA_ISA avx2
#define MLA_NAME "avx2"
#define MLA_AVX2
#define MLA_WIDTH 8
#define MLA_REGISTERS 16
#include "attend.h"
#endif
