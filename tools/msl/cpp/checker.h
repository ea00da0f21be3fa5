// Shadow memory. Only -DMSL_CHECK builds have it; elsewhere these calls vanish.
#pragma once

#include "runtime.h"

namespace msl {

#ifdef MSL_CHECK
void check_launch(const Launch& launch);
void check_done();
#else
inline void check_launch(const Launch&) {}
inline void check_done() {}
#endif

}  // namespace msl
