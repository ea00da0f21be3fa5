// Stands in front of a kernel's text where MLX puts its own utilities: just the names a body may use.
#include <metal_stdlib>
using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;

// Where element number `element`, in row-major order, lies in an array of these strides.
template <typename Index = int64_t>
METAL_FUNC Index elem_to_loc(Index element, const constant int* shape, const constant int64_t* strides, int ndim) {
  Index location = 0, inner = 1;  // inner: the elements in one step along the axis
  for (int axis = ndim; axis-- > 0; inner *= shape[axis]) {
    location += element / inner % shape[axis] * strides[axis];
  }
  return location;
}
