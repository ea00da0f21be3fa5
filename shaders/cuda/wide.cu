// All of the wide kernel.
#include "base.cuh"
#include "pack.cuh"
#include "half.cuh"
#include "async.cuh"
#include "bulk.cuh"
#include "wgmma.cuh"
#include "wide.cuh"
#include "entry.cuh"
