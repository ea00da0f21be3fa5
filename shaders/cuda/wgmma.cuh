// Matrix products of 128 threads that read shared memory themselves (sm_90 only). Operands there lie
// in 128-byte rows of 64 numbers, their 16-byte chunks xor-ed with the row's number (mod 8).
namespace mla {
// An operand by its address and two strides in bytes; 1 << 62 says how it is swizzled.
MLA u64 operand(u32 at, u32 leading, u32 stride) {
  return (at >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}
MLA void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MLA void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last PENDING groups of products are done.
template <int PENDING>
MLA void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler must not move registers that a product is still writing.
template <int N>
MLA void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// Products see what threads, or their copies, wrote.
MLA void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Arrives when all copies that this thread has started are done; doesn't wait for them.
MLA void barrier_arrive_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Four copies of 16 bytes (see async_copy), STEP and 128 bytes apart.
#define COPY_ONE(i) "cp.async.cg.shared.global.L2::128B [%0+" #i "*%3], [%1+" #i "*128], 16, %2;\n"
template <int STEP>
MLA void async_copy_four(u32 to, const void* from, u32 bytes) {
  asm volatile(COPY_ONE(0) COPY_ONE(1) COPY_ONE(2) COPY_ONE(3)::"r"(to), "l"(from), "r"(bytes), "n"(STEP) : "memory");
}
// Copies shared memory, as products see it, to device memory, and waits until it is read.
MLA void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
template <int N>
MLA void registers_fewer() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
MLA void registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define TWENTY_FOUR TEN() TEN(1) "%20,%21,%22,%23}, "
#define MANY \
  TEN()      \
  TEN(1)     \
  TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127}, "
#define PRODUCT(test, n) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " test ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." HALF "." HALF " {"
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F24 F4(0), F4(4), F4(8), F4(12), F4(16), F4(20)
#define F32(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12), F4(i + 16), F4(i + 20), F4(i + 24), F4(i + 28)
#define F128 F32(0), F32(32), F32(64), F32(96)
#define HELD4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// d [64 x 48] = a [64 x 16] b [16 x 48], or += where `add` is not 0. `a` may be held in registers.
MLA void multiply_scores(float (&d)[24], u64 a, u64 b, int add) {
  asm volatile(PRODUCT("%26", "48") TWENTY_FOUR "%24, %25, p, 1, 1, 0, 0;\n}" : F24 : "l"(a), "l"(b), "r"(add));
}
MLA void multiply_scores(float (&d)[24], const u32 (&a)[4], u64 b) {
  asm volatile(PRODUCT("1", "48") TWENTY_FOUR "{%24,%25,%26,%27}, %28, p, 1, 1, 0;\n}" : F24 : HELD4, "l"(b));
}
// d [64 x 256] += a [64 x 16] b [16 x 256]; rows of b lie along its 256.
MLA void multiply_values(float (&d)[128], u64 a, u64 b) {
  asm volatile(PRODUCT("1", "256") MANY "%128, %129, p, 1, 1, 0, 1;\n}" : F128 : "l"(a), "l"(b));
}
MLA void multiply_values(float (&d)[128], const u32 (&a)[4], u64 b) {
  asm volatile(PRODUCT("1", "256") MANY "{%128,%129,%130,%131}, %132, p, 1, 1, 1;\n}" : F128 : HELD4, "l"(b));
}
}  // namespace mla
