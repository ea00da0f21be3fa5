from __future__ import annotations

import pytest
from fakes import FakeBackend, make_device

from mla_tuner.gates import gate
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import bucket_of


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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"context": 0}, "context is outside 1024..1048576 tokens"),
        ({"context": 10**9}, "context is outside 1024..1048576 tokens"),
        ({"dtype": "int8"}, "no kernel for this shape: [Shape] expected dtype"),
        ({"heads": 1000}, "no kernel for this shape: [Shape] expected heads"),
        ({"q_len": 99}, "no kernel for this shape: [Shape] expected q_len"),
        ({"q_len": 2}, "2 query tokens a sequence"),
        ({"context": 16384}, "context 16384 is below 32768"),
        ({"cores": None}, "core count is unknown"),
        ({"batch": 2}, "one pass keeps all 2 cores busy"),
        ({"heads": 17}, "one pass keeps all 2 cores busy"),
        ({"backend": FakeBackend(reason="built for MLX 1.0")}, "built for MLX 1.0"),
        (
            {"backend": FakeBackend(checked=(False, "wrong by 3"))},
            "self-check failed here: wrong by 3",
        ),
    ],
)
def test_each_gate_says_why_it_stays_with_mlx(options: dict[str, object], reason: str) -> None:
    plan, got = ask(**options)  # type: ignore[arg-type]
    assert plan == MLX
    assert reason in got


@pytest.mark.parametrize(
    ("heads", "batch", "cores", "partitions"),
    [(16, 1, 2, 4), (1, 1, 80, 8), (16, 1, 80, 8), (128, 2, 20, 3), (128, 2, 17, 3), (16, 1, 3, 6)],
)
def test_idle_cores_are_filled(heads: int, batch: int, cores: int, partitions: int) -> None:
    plan, reason = ask(heads=heads, batch=batch, cores=cores)
    assert plan == Plan("split", partitions, "r16")
    assert reason.endswith(f"of {cores} cores busy at context 32768")


def test_longer_contexts_never_fall_back() -> None:
    """One token more, or a bucket further, never turns a split into mlx."""
    paths = [ask(context=context, cores=8)[0].path for context in range(20000, 60000, 7)]
    assert paths == sorted(paths)
    assert set(paths) == {"mlx", "split"}
    assert ask(context=1 << 20)[0].path == "split"


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
