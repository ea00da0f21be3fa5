// All of the portable kernel.
#include "base.cuh"
#include "pack.cuh"
#include "half.cuh"
#include "async.cuh"
#include "tensor.cuh"
#include "tile.cuh"
#include "portable.cuh"
#include "entry.cuh"
