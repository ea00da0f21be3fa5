"""Each fault that the emulator promises to see, seeded in a small kernel, is reported."""

from __future__ import annotations

import numpy as np
import pytest

from tools import msl
from tools.msl import EmulationError

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]

SIGNATURE = """struct Many { float f[32]; };
[[kernel]] void f(const device float* x [[buffer(0)]], device float* out [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]]) {
#line 1 "body"
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
MATRIX = "simdgroup_float8x8 m = simdgroup_float8x8(1.0f);"


def run(
    body: str, mode: str = "check", threads: int = 64, groups: int = 1, shuffle: int | None = None
) -> np.ndarray:
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    kernel = msl.build(SIGNATURE + body + "\n}\n", mode)
    kernel.run([x, out], (threads * groups, 1, 1), (threads, 1, 1), shuffle)
    return out


# What is wrong: (body, kind of the report, its details when the threads run in order)
FAULTS = {
    "no barrier between a write and a read": (
        f"threadgroup float s[64]; s[i] = x[i];\nout[i] = s[63 - i]; {BARRIER}",
        "race",
        "read of threadgroup memory `s` .* after a write .* at body:2",
    ),
    "no barrier before the next write": (
        f"threadgroup float s[64]; s[i] = x[i]; {BARRIER} out[i] = s[63 - i];\ns[i] = 2;",
        "race",
        "write to threadgroup memory `s` .* after a read .* at body:2",
    ),
    "a barrier for the wrong memory": (
        "threadgroup float s[64]; s[i] = x[i]; threadgroup_barrier(mem_flags::mem_device);"
        "\nout[i] = s[63 - i];",
        "race",
        "read of threadgroup memory `s`",
    ),
    "a barrier for no memory": (
        "threadgroup float s[64]; s[i] = x[i]; threadgroup_barrier(mem_flags::mem_none);"
        "\nout[i] = s[63 - i];",
        "race",
        "read of threadgroup memory `s`",
    ),
    "a barrier that one thread calls for no memory": (
        "threadgroup float s[64]; s[i] = x[i]; threadgroup_barrier("
        "i ? mem_flags::mem_threadgroup : mem_flags::mem_none);\nout[i] = s[63 - i];",
        "race",
        "read of threadgroup memory `s`",
    ),
    "a simdgroup's barrier for the wrong memory": (
        "threadgroup float s[64]; s[i] = x[i]; simdgroup_barrier(mem_flags::mem_device);"
        "\nout[i] = s[i ^ 1];",
        "race",
        "read of threadgroup memory `s`",
    ),
    "a simdgroup's barrier for no memory": (
        "threadgroup float s[64]; s[i] = x[i]; simdgroup_barrier(mem_flags::mem_none);"
        "\nout[i] = s[i ^ 1];",
        "race",
        "read of threadgroup memory `s`",
    ),
    "a simdgroup's barrier that one lane calls for no memory": (
        "threadgroup float s[64]; s[i] = x[i]; simdgroup_barrier("
        "lane ? mem_flags::mem_threadgroup : mem_flags::mem_none);\nout[i] = s[i ^ 1];",
        "race",
        "read of threadgroup memory `s`",
    ),
    "lanes that count on running in step": (
        "threadgroup float s[64]; s[i] = x[i]; out[i] = s[i ^ 1];",
        "race",
        "read of threadgroup memory `s`",
    ),
    "a simdgroup's barrier between two simdgroups": (
        f"threadgroup float s[64]; s[i] = x[i]; {SIMD_BARRIER} out[i] = s[63 - i];",
        "race",
        "read of threadgroup memory `s`",
    ),
    "all threads write one value": (
        "out[0] = 1;",
        "race",
        "write to device memory `out` .* after a write",
    ),
    "a barrier that leaves out device memory": (
        f"out[i] = 1; {BARRIER} out[63 - i] += 1;",
        "race",
        "read of device memory `out`",
    ),
    "a large struct copied while another thread writes it": (
        f"threadgroup Many s[2]; s[simd].f[lane] = x[i]; {BARRIER}\n"
        "Many mine = s[1 - simd]; s[simd].f[lane] = 2; out[i] = mine.f[lane];",
        "race",
        "threadgroup memory `s`",
    ),
    "a large struct copied that nobody filled": (
        "threadgroup Many s[2]; if (simd == 0) s[0].f[lane] = x[i];\n"
        "Many mine = s[1]; out[i] = mine.f[lane];",
        "uninitialised",
        "read of threadgroup memory `s` at offset 128",
    ),
    "uninitialised threadgroup memory": (
        f"threadgroup float s[64]; if (i < 63) s[i] = x[i]; {BARRIER}\nout[i] = s[i];",
        "uninitialised",
        "read of threadgroup memory `s` at offset 252; thread 63 .* at body:2",
    ),
    "a read past a buffer": (
        "out[i] = x[i + 1];",
        "out of bounds",
        "read of device memory `x` .* at offset 256",
    ),
    "a read far past a buffer": (
        "out[i] = x[i + 100000000];",
        "out of bounds",
        "read of device memory `x` .* at offset 400000000",
    ),
    "a write before a buffer": (
        "(out - 1)[i] = 0;",
        "out of bounds",
        "write to device memory `out` .* at offset -4",
    ),
    "a write to an input": (
        "const_cast<device float*>(x)[i] = 0;",
        "read-only",
        "write to the input `x` at offset 0",
    ),
    "past a threadgroup array, by a pointer": (
        "threadgroup float s[64], t[64]; t[i] = 0; threadgroup float* p = s;\np[i + 1] = x[i];",
        "out of bounds",
        "write to threadgroup memory `s` of 256 bytes, at offset 256.* at body:2",
    ),
    "before a threadgroup array, by a pointer": (
        "threadgroup float s[64]; threadgroup float* p = s;\np[int(i) - 1] = x[i];",
        "out of bounds",
        "write to threadgroup memory `s` of 256 bytes, at offset -4.* at body:2",
    ),
    "past a threadgroup array, by its name": (
        "threadgroup float s[64]; s[i + 1] = x[i];",
        "undefined behaviour",
        "an index outside an array",
    ),
    "past a private array": (
        "float p[4] = {0, 1, 2, 3};\nout[i] = p[lane / 4];",
        "undefined behaviour",
        "an index outside an array.* at body:2",
    ),
    "past a private array, by a pointer": (
        "float p[4] = {0, 1, 2, 3}; thread float* q = p;\nout[i] = q[lane / 4];",
        "undefined behaviour",
        "an index outside an array.* at body:2",
    ),
    "a vector that is not aligned": (
        "const device float4* p = (const device float4*)(x + 1);\nif (i < 4) out[i] = p[i].x;",
        "undefined behaviour",
        "a vector that is not aligned",
    ),
    "a barrier that half of the threads skip": (
        f"if (simd == 0) {BARRIER}\nelse {BARRIER}",
        "divergence",
        r"threadgroup_barrier line 2:\d+, but others wait at threadgroup_barrier line 1:\d+",
    ),
    "two barriers on one line": (
        f"if (simd == 0) {{ {BARRIER} }} else {{ {BARRIER} }}",
        "divergence",
        r"threadgroup_barrier line 1:\d+, but others wait at threadgroup_barrier line 1:\d+",
    ),
    "two simd operations on one line": (
        "out[i] = lane < 8 ? simd_sum(x[i]) : simd_sum(x[i] + 1);",
        "divergence",
        r"lane 8 of simdgroup 0 is at simd_sum line 1:\d+, others wait at simd_sum line 1:\d+",
    ),
    "a barrier that a thread has returned from": (
        f"if (i == 63) return;\n{BARRIER}",
        "divergence",
        r"a thread returned, others wait at threadgroup_barrier line 2:\d+",
    ),
    "a barrier after a return": (
        f"if (i == 0) return;\n{BARRIER}",
        "divergence",
        r"threadgroup_barrier line 2:\d+, but 1 threads have returned",
    ),
    "a simd operation under a lane's condition": (
        "if (lane < 8)\nout[i] = simd_sum(x[i]);\nelse\nout[i] = simd_sum(x[i]);",
        "divergence",
        r"lane 8 of simdgroup 0 is at simd_sum line 4:\d+, others wait at simd_sum line 2:\d+",
    ),
    "a simd operation that some lanes skip": (
        "if (lane < 8)\nout[i] = simd_sum(x[i]);",
        "divergence",
        r"returned, others wait at simd_sum line 2:\d+",
    ),
    "a simd operation after a return": (
        "if (lane < 8) return;\nout[i] = simd_sum(x[i]);",
        "divergence",
        r"simd_sum line 2:\d+ in simdgroup 0, but 8 of its lanes have returned",
    ),
    "lanes at a barrier, others at a simd operation": (
        f"if (lane == 0)\n{BARRIER}\nelse out[i] = simd_sum(x[i]);",
        "stuck",
        "0 of 64 threads returned",
    ),
    "a loop that some lanes leave early": (
        "float s = 0;\nfor (uint k = 0; k <= lane / 16; k++) s += simd_sum(x[i]);\nout[i] = s;",
        "divergence",
        "simd",
    ),
    "a matrix loaded under a lane's condition": (
        f"{MATRIX} if (lane < 8)\nsimdgroup_load(m, x, 8);\nelse simdgroup_store(m, out, 8);",
        "divergence",
        "simdgroup_load",
    ),
    "a matrix product under a lane's condition": (
        f"{MATRIX} if (lane < 8)\nsimdgroup_multiply(m, m, m);\nelse out[i] = simd_sum(x[i]);",
        "divergence",
        "simdgroup_multiply",
    ),
    "too much threadgroup memory": (
        "threadgroup float s[64 * 64], t[64 * 64 + 1]; s[i] = t[i] = x[i];",
        "threadgroup memory",
        "32784 bytes with `t`, and 32768 is all there is",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_checked_mode_reports(name: str) -> None:
    body, kind, details = FAULTS[name]
    with pytest.raises(EmulationError, match=f"(?m)^{kind}: .*{details}"):
        run(body)
    with pytest.raises(EmulationError, match=rf"(?m)^{kind}: .*; thread \d+ of threadgroup \(0"):
        run(body, shuffle=7)  # another thread may be the first


CORRECT = {
    "a barrier": f"threadgroup float s[64]; s[i] = x[i]; {BARRIER} out[i] = s[63 - i];",
    "barriers of a simdgroup": f"threadgroup float s[64]; s[i] = x[i]; {SIMD_BARRIER} "
    f"out[i] = s[i ^ 1]; {SIMD_BARRIER} s[i ^ 2] = 0;",
    "barriers in a loop": "threadgroup float s[64]; for (int k = 0; k < 3; k++) "
    f"{{ s[i] = k; {BARRIER} out[i] = s[63 - i]; {BARRIER} }}",
    "a barrier for device memory": "out[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); "
    "if (i == 0) out[63] = out[62] + out[61];",
    "simdgroups that go different ways": "out[i] = simd == 0 ? simd_sum(x[i]) : simd_max(x[i]);",
    "a large struct": "threadgroup Many s[2]; s[simd].f[lane] = x[i]; "
    f"{BARRIER} Many mine = s[1 - simd]; out[i] = mine.f[lane];",
    "many readers of one value": "threadgroup float s; if (i == 0) s = x[0]; "
    f"{BARRIER} out[i] = s;",
}


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("shuffle", [None, 0, 7])
def test_correct_kernels_are_not_reported(name: str, shuffle: int | None) -> None:
    run(CORRECT[name], shuffle=shuffle)


LOOP = CORRECT["barriers in a loop"]


@pytest.mark.parametrize("barrier", range(LOOP.count(BARRIER)))
def test_each_barrier_of_a_loop_is_needed(barrier: int) -> None:
    before = BARRIER.join(LOOP.split(BARRIER)[: barrier + 1])
    without = before + LOOP[len(before) + len(BARRIER) :]
    assert without.count(BARRIER) == LOOP.count(BARRIER) - 1
    with pytest.raises(EmulationError, match=r"(?m)^race: "):
        run(without)


def test_numbers_alone_do_not_show_a_wrong_fence() -> None:
    for name in ("a barrier for no memory", "all threads write one value"):
        body, _, _ = FAULTS[name]
        assert run(body, "fast")[0] == 1


def test_races_between_threadgroups() -> None:
    with pytest.raises(EmulationError, match=r"race: write to device memory .* after a write"):
        run("out[i] = x[i];", groups=2)
    body = "if (group.x < 2) out[group.x] = out[2] + out[3]; else out[2] = 1;"
    with pytest.raises(EmulationError, match=r"race: write to device memory .* after a read"):
        run(body, groups=3, threads=1)


def test_a_threadgroup_starts_without_what_the_last_one_left() -> None:
    body = "threadgroup float s[64]; if (group.x == 0) s[i] = x[i];\nelse out[i] = s[i];"
    with pytest.raises(EmulationError, match=r"uninitialised: .*threadgroup \(1, 0, 0\)"):
        run(body, groups=2)
    assert np.isnan(run(body, mode="fast", groups=2)).all()


def test_matrices_need_a_full_simdgroup() -> None:
    report = r"matrix operation line 1:\d+ in a simdgroup of 16 lanes"
    with pytest.raises(EmulationError, match=report):
        run(f"{MATRIX} simdgroup_multiply(m, m, m); out[i] = m.thread_elements()[0];", threads=16)


def test_private_memory_is_limited() -> None:
    with pytest.raises(EmulationError, match="stack overflow: a thread uses more than 65536 bytes"):
        run(
            "float p[20000]; for (int k = 0; k < 20000; k++) p[k] = x[k % 64];"
            "out[i] = p[int(x[i])];",
            mode="fast",
        )


def test_fast_mode_survives_a_wild_access_and_names_it() -> None:
    report = r"out of bounds: buffer 0 \(x\) of 256 bytes, at offset 4000000; .* at body:2"
    with pytest.raises(EmulationError, match=report):
        run("out[i] =\nx[i + 1000000];", mode="fast")
    with pytest.raises(EmulationError, match="wild address"):
        run("out[i] = x[long(i + 1) << 40];", mode="fast")
    assert run("out[i] = x[i] + 1;", mode="fast").tolist() == [2] * 64


def test_an_atomic_that_nothing_checks_does_not_build() -> None:
    with pytest.raises(msl.SourceError, match="tsan_atomic"):
        run("__atomic_fetch_add((device int*)out, 1, 0);")


def test_counts() -> None:
    body = f"""
      threadgroup float s[64];
      s[i] = x[i];
      {BARRIER}
      {MATRIX}
      simdgroup_multiply_accumulate(m, m, m, m);
      {SIMD_BARRIER}
      out[i] = fma(s[63 - i], 2.0f, exp2(simd_sum(1.0f))) + m.thread_elements()[0];
    """
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    counts = msl.build(SIGNATURE + body + "}\n", "check").run([x, out], (64, 1, 1), (64, 1, 1))
    assert counts == msl.Counts(
        read={"x": 256, "out": 0},
        written={"out": 256},
        matrix_ops=2,
        simd_ops=2,
        barriers=1,
        simd_barriers=2,
        fmas=64,
        exp2s=64,
        threadgroup_read=256,
        threadgroup_written=256,
        threadgroup_bytes=256,
    )


def test_a_launch_that_metal_refuses() -> None:
    kernel = msl.build(SIGNATURE + "out[0] = 0;}")
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(ValueError, match="at most 1024 threads a threadgroup; got 1056"):
        kernel.run([x, out], (1056, 1, 1), (1056, 1, 1))
    with pytest.raises(ValueError, match="a grid that is not empty"):
        kernel.run([x, out], (0, 1, 1), (32, 1, 1))
    with pytest.raises(ValueError, match="expected 2 buffers; got 1"):
        kernel.run([x], (32, 1, 1), (32, 1, 1))
    with pytest.raises(ValueError, match="buffer 1 is written: it must be contiguous"):
        kernel.run([x, out[::2]], (32, 1, 1), (32, 1, 1))
    with pytest.raises(ValueError, match="first element; got a reversed one"):
        kernel.run([x[::-1], out], (32, 1, 1), (32, 1, 1))


def test_the_same_kernel_again_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = SIGNATURE + "out[0] = 0;}"
    first = msl.build(text).path
    msl.library.build.cache_clear()
    msl.library.for_emulator.cache_clear()
    monkeypatch.setenv("PATH", "")  # no g++ any more
    with pytest.raises(FileNotFoundError, match="expected g"):
        msl.build(text)
    monkeypatch.undo()
    changed = first.stat().st_mtime_ns
    assert msl.build(text).path == first
    assert first.stat().st_mtime_ns == changed
