// All of the merge kernel.
#include "base.cuh"
#ifdef HALF
#include "pack.cuh"
#endif
#include "merge.cuh"
