// Copies of 16 bytes that don't wait (sm_80 and later).
namespace mla {
// Only `bytes` of them are read, the rest is 0.
MLA void async_copy(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
MLA void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
MLA void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
}  // namespace mla
