"""Every back end that runs here against float64, on one table of cases.

A later back end passes by adding its name to BACKENDS: nothing below knows which kernel runs.

On a machine with a GPU `pytest tests/conformance/test_conformance.py -k cuda` (or `metal`) runs all
of it there, in minutes, most of which go to compiling; the CPU kernel need not be built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from running import assert_ran, rows_of, run
from table import FACTORS, TABLE, Entry, pairs

from mla_tuner import DenseCache, backends, last_run
from mla_tuner.cases import check, conformance_subset, make_case
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape

GPUS = {name: backends.get(name).available() for name in ("metal", "cuda")}
BACKENDS = ["cpu", *(name for name, (able, _) in GPUS.items() if able)]
CASES = [pytest.param(seed, entry, id=str(entry)) for seed, entry in enumerate(TABLE)]
# MLX's CPU matmul is a reference BLAS: rows x tokens beyond this take seconds.
MLX_WORK = 1 << 18


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[backends.Backend]:
    with mx.stream(mx.cpu if request.param == "cpu" else mx.gpu):
        yield backends.get(request.param)


@pytest.fixture
def native(backend: backends.Backend, request: pytest.FixtureRequest) -> backends.Backend:
    """The same, for tests that mean to run its kernels; a GPU's are texts, so none is built."""
    if backend.name == "cpu":
        request.getfixturevalue("kernel")
    return backend


def isas() -> list[str]:
    if not backends.get("cpu").available()[0]:
        return ["none"]
    from mla_tuner import _native

    return list(_native.isas())


def poison_memory(entry: Entry) -> None:
    """Leaves NaN where the next call's partial answers are likely to be allocated."""
    numbers = entry.heads * entry.q_len * len(entry.lengths) * (entry.geometry.kv_lora_rank + 2)
    for count in (1, entry.partitions):
        mx.eval(mx.full((numbers * count,), mx.nan))


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_that_is_here_is_among_the_back_ends(name: str) -> None:
    able, reason = GPUS[name]
    if not able:
        pytest.skip(f"the {name} kernels can't run here: {reason}")
    assert name in BACKENDS


@pytest.mark.parametrize(("seed", "entry"), CASES)
def test_native_kernel(native: backends.Backend, seed: int, entry: Entry) -> None:
    case, rows = entry.case(seed), rows_of(entry)
    plan = entry.plan(native.tiles(entry.shape))
    out, lse = run(case, plan)
    assert_ran(plan, entry.shape.context)
    result = check(case, out, lse, plan, rows)
    assert result.ok, result.reason
    poison_memory(entry)
    again, lse_again = run(case, plan)
    assert mx.array_equal(out, again)
    assert mx.array_equal(lse, lse_again)


@pytest.mark.parametrize("path", ["mlx", "mlx_rows"])
@pytest.mark.parametrize(("seed", "entry"), CASES[::2])
def test_mlx_paths(backend: backends.Backend, seed: int, entry: Entry, path: str) -> None:
    if entry.heads * entry.q_len * sum(entry.lengths) > MLX_WORK:
        entry = entry._replace(lengths=tuple(min(n, 130) for n in entry.lengths))
    if entry.dtype != "float32" or backend.name != "cpu":
        # Scores of 100 and more, rounded to 8 or 11 bits (and float32 to TF32 on a GPU): MLX's own
        # paths have no truth to meet.
        entry = entry._replace(logit_scale=1.0)
    case, plan = entry.case(seed), Plan(path)
    result = check(case, *run(case, plan), plan)
    assert result.ok, result.reason


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(("seed", "entry"), CASES[1::6])
def test_every_instruction_set(isa: str, seed: int, entry: Entry) -> None:
    from mla_tuner import _native

    backend = backends.get("cpu")
    case, plan = entry.case(seed), entry.plan(backend.tiles(entry.shape))
    _native.set_isa(isa)
    try:
        out, lse = run(case, plan)
        found = last_run()
    finally:
        _native.set_isa("")
    assert found is not None
    assert found.detail["isa"] == isa
    result = check(case, out, lse, plan, rows_of(entry))
    assert result.ok, result.reason


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("plan", [Plan("mlx"), Plan("mlx_rows"), Plan("single"), Plan("split", 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_strides(dtype: str, plan: Plan) -> None:
    """Queries as a projection leaves them, and latent and rope keys side by side in one buffer."""
    case = make_case(Shape(300, 2, 12, dtype, q_len=3, layout="dense"), starts=(0, 40))
    cache = case.cache
    assert isinstance(cache, DenseCache)
    assert cache.k_pe is not None
    assert case.q_pe is not None
    together = mx.concatenate([cache.k_pe, cache.latent], axis=-1)
    latent, k_pe = together[..., 64:], together[..., :64]
    q_nope, q_pe = (
        mx.contiguous(q.swapaxes(1, 2)).swapaxes(1, 2) for q in (case.q_nope, case.q_pe)
    )
    mx.eval(latent, k_pe, q_nope, q_pe)
    assert np.asarray(k_pe.view(mx.uint8)).strides[2] == 576 * case.q_nope.itemsize
    strided = replace(
        case, q_nope=q_nope, q_pe=q_pe, cache=replace(cache, latent=latent, k_pe=k_pe)
    )
    out, lse = run(strided, plan)
    assert_ran(plan, 300)
    result = check(case, out, lse, plan)
    assert result.ok, result.reason


@pytest.mark.usefixtures("native")
def test_partition_counts_agree() -> None:
    """Splitting changes the order of sums, and nothing else."""
    entry = TABLE[0]._replace(heads=20, dtype="float32", lengths=(4096, 700), partitions=1)
    case = entry.case(0)
    whole, whole_lse = run(case, Plan("single"))
    for partitions in (2, 7, 64):
        out, lse = run(case, Plan("split", partitions))
        assert_ran(Plan("split", partitions), 4096)
        np.testing.assert_allclose(np.array(out), np.array(whole), rtol=0, atol=3e-6)
        np.testing.assert_allclose(np.array(lse), np.array(whole_lse), rtol=2e-6)


def test_verify_shares_cases(backend: backends.Backend) -> None:
    """The subset that `mla-tune verify` runs passes, and reaches every tile, single and split."""
    reached = set()
    for name, case, plan in conformance_subset(backend):
        result = check(case, *run(case, plan), plan)
        assert result.ok, f"{name} {plan}: {result.reason}"
        reached.add((plan.path, plan.tile))
    tiles = {tile for heads in range(1, 129) for tile in backend.tiles(Shape(300, 1, heads))}
    assert reached >= {(path, tile) for path in ("single", "split") for tile in tiles}
    assert reached >= {("mlx", ""), ("mlx_rows", "")}


def test_table_covers_every_pair() -> None:
    covered = {pair for entry in TABLE for pair in pairs(entry)}
    names = list(FACTORS)
    wanted = sum(
        len(FACTORS[a]) * len(FACTORS[b]) for i, a in enumerate(names) for b in names[i + 1 :]
    )
    assert len(covered) >= wanted
    assert {n for entry in TABLE for n in entry.lengths} >= {0, 1, 2, 63, 64, 65, 100, 4096, 40000}
