// All of the simple kernel.
#include "base.cuh"
#include "simple.cuh"
#include "entry.cuh"
