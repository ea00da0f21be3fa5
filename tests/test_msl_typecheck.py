"""The type check: a sound kernel passes, and the commonest Metal compile errors do not."""

from __future__ import annotations

import pytest

from tools import msl
from tools.msl import typecheck

pytest.importorskip("ziglang", reason="the type check needs zig's clang: pip install ziglang")
pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]

SOUND = """
struct Piece { int begin, end; };
template <typename T, typename Pointer>
METAL_FUNC T first_of(Pointer from, thread const Piece& piece) {
  return T(from[piece.begin]);
}
METAL_FUNC void scale_rows(thread simdgroup_float8x8 (&rows)[2], const threadgroup float* factor) {
  for (int i = 0; i < 2; i++) {
    rows[i].thread_elements()[0] *= factor[i];
  }
}
template <typename T, int N>
[[kernel]] void f(
    const device T* x [[buffer(0)]],
    const constant int* lengths [[buffer(1)]],
    const constant float& scale [[buffer(2)]],
    device float* out [[buffer(3)]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float factor[32];
  threadgroup T tile[64];
  const device T* q = x + lane;
  device float* to = out;
  Piece piece;
  piece.begin = 0;
  piece.end = min(N, lengths[0]);
  factor[lane] = exp2(scale) * float(q[0]) + float(first_of<T>(lengths, piece));
  const vec<T, 4> four = *(const device vec<T, 4>*)(x);
  const uint4 raw = uint4(0);
  tile[lane] = four[1];
  out[lane] = as_type<float>(raw[1]) + simd_sum(factor[lane]);
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  simdgroup_float8x8 sum[2];
  simdgroup_matrix<T, 8, 8> left;
  simdgroup_load(left, tile, 8);
  sum[0] = sum[1] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  scale_rows(sum, factor);
  simdgroup_multiply_accumulate(sum[0], left, left, sum[0]);
  simdgroup_store(sum[0], to, 8);
}
template [[host_name("g")]] [[kernel]] decltype(f<TYPE, 8>) f<TYPE, 8>;
"""


@pytest.mark.parametrize("dtype", ["half", "bfloat", "float", "float16_t", "bfloat16_t"])
def test_a_sound_kernel_passes(dtype: str) -> None:
    text = SOUND.replace("TYPE", dtype)
    assert msl.type_check(text) == ""
    msl.build(text)  # the emulator takes it too


FAULTS = {  # what is wrong: (right, wrong, message)
    "a local pointer without space": (
        "const device T* q =",
        "const T* q =",
        "cannot initialize a variable of type 'const _Float16 *'",
    ),
    "a threadgroup pointer to device memory": (
        "device float* to =",
        "threadgroup float* to =",
        "cannot initialize a variable of type 'threadgroup",
    ),
    "a parameter without space": (
        "const threadgroup float* factor)",
        "const float* factor)",
        "no matching function for call to 'scale_rows'",
    ),
    "an argument in another space": (
        "scale_rows(sum, factor)",
        "scale_rows(sum, out)",
        "no matching function for call to 'scale_rows'",
    ),
    "a cast to another address space": (
        "*(const device vec<T, 4>*)(x)",
        "*(const threadgroup vec<T, 4>*)(x)",
        "a cast to another address space",
    ),
    "a cast that forgets the address space": (
        "*(const device vec<T, 4>*)(x)",
        "*(const vec<T, 4>*)(x)",
        "a cast to another address space",
    ),
    "a reinterpreting cast to another address space": (
        "*(const device vec<T, 4>*)(x)",
        "*reinterpret_cast<const threadgroup vec<T, 4>*>(x)",
        "reinterpret_cast from",
    ),
    "a matrix stored into constant memory": (
        "simdgroup_store(sum[0], to, 8)",
        "simdgroup_store(sum[0], &scale, 8)",
        "no matching function for call to 'simdgroup_store'",
    ),
    "a matrix loaded from another type": (
        "simdgroup_load(left, tile, 8)",
        "simdgroup_load(left, factor, 8)",
        "no matching function for call to 'simdgroup_load'",
    ),
    "two types for min": ("min(N, lengths[0])", "min(N, scale)", "call to 'min' is ambiguous"),
    "a write to constant memory": (
        "  Piece piece;",
        "  scale = 1.0f; Piece piece;",
        "cannot assign to variable 'scale' with const",
    ),
    "a function that is not there": ("exp2(scale)", "expp2(scale)", "identifier 'expp2'"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_refuses(what: str) -> None:
    right, wrong, message = FAULTS[what]
    text = SOUND.replace("TYPE", "half")
    assert text.count(right) == 1
    assert message in msl.type_check(text.replace(right, wrong))


def test_errors_name_the_line() -> None:
    text = "[[kernel]] void f(device int* out [[buffer(0)]]) {\n  device float* p = out;\n}\n"
    assert "kernel.metal:2:" in msl.type_check(text)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    typecheck.clang.cache_clear()
    with pytest.raises(FileNotFoundError, match="pip install ziglang"):
        typecheck.clang()
    typecheck.clang.cache_clear()
