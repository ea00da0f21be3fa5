"""Every CUDA source is compiled by NVRTC, as MLX compiles it on the user's machine; none is run.

Every tile in the usual geometry and in both layouts, and each kernel once in every other geometry
and dtype. Left out: the rest of the product; nothing in the texts depends on two of them together.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from mla_tuner.backends import Call, cuda_tiles, next_ticket
from mla_tuner.backends.cuda import CudaBackend
from mla_tuner.cases import make_case
from mla_tuner.plan import Plan
from mla_tuner.shapes import DEEPSEEK, DTYPES, GEOMETRIES, LAYOUTS, Shape
from tools.nvrtc import Compiled, Kernel, Nvrtc, find, recorded

HALVES = ("bfloat16", "float16")
SPILLED = 128  # bytes, by r32 (r24: 8): nine warps leave 168 registers to a thread


def usual() -> list[tuple[str, Shape]]:
    """Tile and shape: all tiles in the usual geometry, in bfloat16 where they take it."""
    found = []
    for name, layout in product(cuda_tiles.TILES, LAYOUTS):
        dtype = "float32" if cuda_tiles.TILES[name].kernel == "simple" else "bfloat16"
        found.append((name, Shape(100, 1, 16, dtype, DEEPSEEK, 1, layout)))
    return found


def others() -> list[tuple[str, Shape]]:
    """One tile of each kernel in every other geometry and dtype."""
    found = []
    for name in ("r16", "r64w", "r16p", "r8f"):
        for i, geometry in enumerate(GEOMETRIES):
            dtype = "float32" if name == "r8f" else HALVES[(i + 1) % 2]
            shape = Shape(100, 1, 16, dtype, geometry, 1, LAYOUTS[i % 2])
            if cuda_tiles.refusal(name, shape, 90) is None:
                found.append((name, shape))
    return found


def kernels(name: str, shape: Shape, plan: Plan, want_lse: bool = False) -> list[Kernel]:
    """The texts that a call launches."""
    case = make_case(shape)
    starts, lengths = (0,) * shape.batch, tuple(case.cache.lengths)
    ticket = next_ticket()
    call = Call(case.q_nope, case.q_pe, case.cache, 1.0, shape, lengths, starts, ticket, want_lse)
    with recorded() as found:
        CudaBackend().run(plan, call)
    assert len(found) == 1 + (plan.path == "split")
    return found


def architectures(name: str) -> tuple[str, ...]:
    """What a tile's kernel runs on."""
    return {"portable": ("sm_80",), "simple": ("sm_80", "sm_90a")}.get(
        cuda_tiles.TILES[name].kernel, ("sm_90a",)
    )


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    library = find()
    if library is None:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    return Nvrtc(library)


@pytest.fixture(scope="module")
def compiled(compiler: Nvrtc) -> dict[tuple[str, str], tuple[Kernel, Compiled | str]]:
    """What became of each text, by architecture and name: code, or the compiler's words."""
    work: dict[tuple[str, str], Kernel] = {}
    calls = [(name, shape, Plan("split", 2, name), False) for name, shape in (*usual(), *others())]
    for name, shape in others():  # with the log-sum-exp as a second output
        calls += [(name, shape, Plan(*plan, name), True) for plan in (("single", 1), ("split", 2))]
    for name, *call in calls:
        for kernel, target in product(kernels(name, *call), architectures(name)):
            work[target, kernel.name] = kernel

    def compile_one(item: tuple[tuple[str, str], Kernel]) -> Compiled | str:
        (target, name), kernel = item
        try:
            return compiler.compile(kernel.text, name, target)
        except ValueError as error:
            return f"{target} {name}: {error}"

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(compile_one, work.items()))
    return {key: (work[key], result) for key, result in zip(work, results, strict=True)}


def test_kernels_of_one_name_have_one_text() -> None:
    """They are kept by name."""
    texts: dict[str, str] = {}
    for name, *kind in product(cuda_tiles.TILES, DTYPES, GEOMETRIES, LAYOUTS):
        dtype, geometry, layout = kind
        shape = Shape(100, 1, 16, dtype, geometry, 1, layout)
        if cuda_tiles.refusal(name, shape, 90) is not None:
            continue
        for plan, want_lse in product((Plan("single", 1, name), Plan("split", 2, name)), (0, 1)):
            for kernel in kernels(name, shape, plan, bool(want_lse)):
                assert texts.setdefault(kernel.name, kernel.text) == kernel.text
                assert kernel.name.isidentifier()
    assert len(texts) > 150


def test_every_text_compiles(
    compiled: dict[tuple[str, str], tuple[Kernel, Compiled | str]],
) -> None:
    failures = [result for _, result in compiled.values() if isinstance(result, str)]
    assert not failures, "\n".join(failures)
    assert len(compiled) > 30


def test_registers_leave_room_for_every_thread(
    compiled: dict[tuple[str, str], tuple[Kernel, Compiled | str]],
) -> None:
    for kernel, result in compiled.values():
        assert isinstance(result, Compiled)
        assert result.registers * kernel.threadgroup[0] <= 65536, kernel.name
        assert result.spill_bytes <= SPILLED, f"{kernel.name} spills {result.spill_bytes} bytes"
        assert "warning" not in result.log.lower(), result.log  # as of registers left as they were


def test_a_text_that_does_not_compile_says_why(compiler: Nvrtc) -> None:
    text = "namespace mlx::core::cu { __global__ void f() { undeclared = 1; } }"
    with pytest.raises(ValueError, match='identifier "undeclared" is undefined'):
        compiler.compile(text, "f", "sm_80")
