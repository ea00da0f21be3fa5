from __future__ import annotations

from itertools import pairwise

import pytest
from fakes import FakeBackend, make_device

from mla_tuner.gates import LONG_CONTEXT, checks, gate
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import CONTEXT_GRID, MAX_PARTITIONS, Shape, bucket_of
from tools.replay.devices import SimBackend, apples


def ask(
    context: int = 32768,
    batch: int = 1,
    heads: int = 16,
    dtype: str = "bfloat16",
    q_len: int = 1,
    cores: int | None = 2,
    backend: FakeBackend | None = None,
) -> tuple[Plan, str]:
    backend = backend or FakeBackend()
    bucket = bucket_of(context, batch, heads, dtype, q_len=q_len)
    return gate(bucket, make_device(cores), backend)


REFUSED = [
    ({"backend": FakeBackend(reason="built for MLX 1.0")}, "built", "built for MLX 1.0"),
    ({"context": 0}, "on_grid", "context is outside 1024..1048576 tokens"),
    ({"context": 10**9}, "on_grid", "context is outside 1024..1048576 tokens"),
    ({"dtype": "int8"}, "legal", "no kernel for this shape: expected dtype"),
    ({"heads": 1000}, "legal", "no kernel for this shape: expected heads"),
    ({"q_len": 99}, "legal", "no kernel for this shape: expected q_len"),
    ({"q_len": 2}, "one_token", "2 query tokens a sequence"),
    ({"context": 16384}, "long_context", "context 16384 is below 32768"),
    ({"heads": 17}, "few_rows", "17 heads are more than the 16"),
    ({"cores": None}, "cores_known", "core count is unknown"),
    ({"batch": 2}, "idle", "one pass keeps all 2 cores busy"),
    ({"cores": 132}, "filled", "1 x 128 pieces keep 132 cores 48% busy, less than 85%"),
    (
        {"backend": FakeBackend(checked=(False, "wrong by 3"))},
        "proven",
        "self-check failed here: wrong by 3",
    ),
]


@pytest.mark.parametrize(("options", "name", "reason"), REFUSED)
def test_each_gate_says_why_it_stays_with_mlx(
    options: dict[str, object], name: str, reason: str
) -> None:
    plan, got = ask(**options)  # type: ignore[arg-type]
    assert plan == MLX
    assert reason in got
    helps = name not in ("built", "on_grid", "legal", "proven")  # what tuning does not change
    assert ("; to tune this shape: mla-tune --device " in got) == helps


def test_no_command_is_named_that_would_be_refused() -> None:
    assert "mla-tune" in ask(batch=256)[1]
    assert "mla-tune" not in ask(batch=512)[1]


def test_every_gate_can_stay_shut_and_all_can_open() -> None:
    opened = list(checks(bucket_of(32768, 1, 16, "bfloat16"), make_device(), FakeBackend()))
    assert all(check.passed and check.reason for check in opened)
    assert [check.name for check in opened] == list(dict.fromkeys(name for _, name, _ in REFUSED))


@pytest.mark.parametrize(
    ("heads", "batch", "cores", "partitions"),
    [(16, 1, 2, 4), (16, 1, 3, 6), (1, 1, 10, 20), (16, 2, 7, 7), (16, 8, 20, 5), (16, 2, 40, 40)],
)
def test_idle_cores_are_filled_with_two_tasks_each(
    heads: int, batch: int, cores: int, partitions: int
) -> None:
    plan, reason = ask(heads=heads, batch=batch, cores=cores)
    assert plan == Plan("split", partitions, "r16")
    assert reason.endswith(f"one pass keeps {batch} of {cores} cores busy at context 32768")


def test_longer_contexts_never_fall_back() -> None:
    """One token more never turns a split into mlx, at the grid's edges and anywhere."""
    edges = [n + step for n in range(20000, 60000, 997) for step in (0, 1)]
    means = (round((a * b) ** 0.5) for a, b in pairwise(CONTEXT_GRID))
    edges += [mean + step for mean in means for step in (-1, 0, 1, 2)]
    buckets = sorted({bucket_of(n, 1, 16, "bfloat16").context for n in edges})
    assert buckets == list(CONTEXT_GRID)
    device = {cores: make_device(cores) for cores in (1, 2, 3, 7, 10, 19, 38, 40, 76, 80, 132)}
    for cores, here in device.items():
        for batch in (1, 2, 4, 8, 16, 32, 64):
            for heads in (1, 16, 20):
                shapes = (bucket_of(n, batch, heads, "bfloat16") for n in buckets)
                plans = [gate(one, here, FakeBackend())[0] for one in shapes]
                paths = [plan.path for plan in plans]
                assert paths == sorted(paths), (cores, batch, heads)
                assert all(p.path == "mlx" or p.partitions <= MAX_PARTITIONS for p in plans)
    inside = [ask(context=n, cores=8)[0].path for n in sorted(edges)]
    assert inside == sorted(inside)
    assert set(inside) == {"mlx", "split"}


@pytest.mark.parametrize("nax", [True, False])
def test_no_simulated_apple_gpu_is_slower_than_mlx(nax: bool) -> None:
    """M1 to M5, 7 to 80 cores: 5 % at most by the model, and often a plan at all."""
    splits = 0
    for hardware in apples(nax=nax):
        backend = SimBackend(hardware)
        for heads in (1, 9, 16, 20):
            for batch in (1, 2, 8, 32):
                for context in (LONG_CONTEXT, 1 << 20):
                    for layout in ("paged", "dense"):
                        shape = Shape(context, batch, heads, layout=layout)
                        plan, reason = gate(shape.bucket, hardware.device, backend)
                        ratio = hardware.seconds(shape, plan) / hardware.seconds(shape, MLX)
                        assert ratio <= 1.05, (hardware.device.name, str(shape), plan, reason)
                        splits += plan.path == "split"
    assert splits > 400


def test_the_kernel_is_not_run_for_a_plan_that_does_not_need_it() -> None:
    class Unasked(FakeBackend):
        def self_check(self) -> tuple[bool, str]:
            raise AssertionError("the self-check ran")

    assert ask(context=1024, backend=Unasked())[0] == MLX


@pytest.mark.parametrize(
    "options",
    [
        *({"context": context} for context in (0, 1024, 32768, 10**9)),
        *({"dtype": "int8"}, {"heads": 1000}, {"q_len": 2}, {"q_len": 99}),
        *({"cores": None}, {"batch": 64}, {"heads": 128}),
    ],
    ids=str,
)
def test_a_missing_kernel_comes_before_everything(options: dict[str, object]) -> None:
    missing = FakeBackend(reason="built for MLX 1.0", checked=(False, "not run"))
    assert ask(**options, backend=missing) == (MLX, "built for MLX 1.0")  # type: ignore[arg-type]
