// Matrix products of 128 threads that read shared memory themselves (sm_90 only). Both operands lie
// in 128-byte rows of 64 numbers, their 16-byte chunks xor-ed with the row's number (mod 8).
namespace mla {
// An operand by its address and two strides in bytes; 1 << 62 says how it is swizzled.
MLA u64 operand(u32 at, u32 leading, u32 stride) {
  return (at >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}
MLA void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MLA void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// The compiler must not move registers that a product is still writing.
template <int N>
MLA void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
MLA void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int N>
MLA void registers_fewer() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
MLA void registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define MULTIPLY_SCORES                                       \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                \
  "wgmma.mma_async.sync.aligned.m64n32k16.f32." HALF "." HALF \
  " {" TEN() "%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;\n}"
#define MULTIPLY_VALUES                                                                                             \
  "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                                        \
  "wgmma.mma_async.sync.aligned.m64n256k16.f32." HALF "." HALF " {" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) \
      TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, p, 1, 1, 0, 1;\n}"
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F64(i) F16(i), F16(i + 16), F16(i + 32), F16(i + 48)
// d [64 x 32] = a [64 x 16] b [16 x 32], or += where `add` is not 0.
MLA void multiply_scores(float (&d)[16], u64 a, u64 b, int add) {
  asm volatile(MULTIPLY_SCORES : F16(0) : "l"(a), "l"(b), "r"(add));
}
// d [64 x 256] += a [64 x 16] b [16 x 256]; rows of b lie along its 256.
MLA void multiply_values(float (&d)[128], u64 a, u64 b) {
  asm volatile(MULTIPLY_VALUES : F64(0), F64(64) : "l"(a), "l"(b));
}
}  // namespace mla
