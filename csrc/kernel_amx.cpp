// Linux x86-64 with AMX tiles for bfloat16, besides AVX-512: Sapphire Rapids and later. Compiles to nothing where the
// compiler knows no AMX. Emulated (tools/sanitize), it runs on any CPU with vectors as the compiler sees fit.
#if defined(MLA_AMX_EMULATED)
#define MLA_BASE generic
#elif defined(MLA_AMX)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "compile this file like kernel_avx512.cpp, with -mamx-tile -mamx-bf16"
#endif
#define MLA_BASE avx512
#define MLA_AVX2
#define MLA_AVX512
#endif
#if defined(MLA_BASE)
#define MLA_ISA amx
#define MLA_WIDTH 16
#define MLA_REGISTERS 32
#include "attend_amx.h"
#endif
