// Two floats as 16-bit numbers.
#define CONVERT "cvt.rn." HALF "x2.f32 %0, %1, %2;"
namespace mla {
MLA u32 pack(float low, float high) {
  u32 both;
  asm(CONVERT : "=r"(both) : "f"(high), "f"(low));
  return both;
}
}  // namespace mla
