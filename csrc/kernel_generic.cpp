// Any CPU: vectors of four floats, as the compiler sees fit.
#define MLA_ISA generic
#define MLA_NAME "generic"
#define MLA_WIDTH 4
#define MLA_REGISTERS 16
#include "attend.h"
