// All of the small kernel.
#include "base.cuh"
#include "pack.cuh"
#include "half.cuh"
#include "tensor.cuh"
#include "tile.cuh"
#include "bulk.cuh"
#include "small.cuh"
#include "entry.cuh"
