// arm64: NEON is part of the baseline.
#if defined(__aarch64__)
#define MLA_ISA neon
#define MLA_NAME "neon"
#define MLA_NEON
#define MLA_WIDTH 4
#define MLA_REGISTERS 32
#include "attend.h"
#endif
