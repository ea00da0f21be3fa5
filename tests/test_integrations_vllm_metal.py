"""vllm-metal through the tuned plan: the same answers, by kernels that ran, or by its own code.

Every test runs on a stand-in; on the real thing, too, where VLLM_METAL_CHECKOUT names a checkout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from serving_steps import BOUND, StubPolicy, breaking_late, distance
from tiny_models import HEADS
from vllm_steps import (
    BLOCK,
    CLASS,
    HIDDEN,
    LAYERS,
    RAGGED,
    WIDTH,
    Server,
    engine_as_it_is,
    engines,
    mla_layers,
)

from mla_tuner import last_run
from mla_tuner.integrations import vllm_routing
from mla_tuner.integrations.vllm_metal import install, stats, uninstall
from mla_tuner.plan import MLX, Plan

pytestmark = pytest.mark.usefixtures("kernel")

ENGINES = engines()


@pytest.fixture(params=ENGINES, ids=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    engine = ENGINES[request.param](monkeypatch)
    with engine_as_it_is(engine):
        yield engine


@pytest.fixture(scope="module")
def layers() -> list[Any]:
    return mla_layers()


# --- the same answers, by kernels that ran


@pytest.mark.parametrize("plan", [Plan("single"), Plan("split", 2), Plan("mlx_rows")], ids=str)
@pytest.mark.parametrize("lengths", [(90,), RAGGED], ids=["one", "ragged"])
def test_outputs_are_those_of_the_engine(
    engine: Any, layers: list[Any], lengths: tuple[int, ...], plan: Plan
) -> None:
    theirs = Server(engine, layers, lengths).decode()
    policy = StubPolicy(plan)
    assert install(policy).classes == {CLASS: "routed"}
    ours = Server(engine, layers, lengths).decode()
    ran = last_run()
    assert distance(ours, theirs) < BOUND
    assert ran is not None
    assert ran.executed is not None
    assert (ran.executed.path, ran.executed.partitions) == (plan.path, plan.partitions)
    assert ran.decision.source == "tuned"
    assert stats().plans == {str(plan): 3 * LAYERS}
    assert stats().stock == 0
    assert [asked[-1] for asked in policy.asked] == ["paged"] * 3
    assert stats().look_ups == 3


def test_the_comparison_can_fail(
    engine: Any, layers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Server(engine, layers).decode(1)
    install(StubPolicy())
    whole = vllm_routing.mla_decode
    without: Any = lambda q, q_pe, *rest, **options: whole(q, q_pe * 0, *rest, **options)  # noqa: E731
    monkeypatch.setattr(vllm_routing, "mla_decode", without)
    assert distance(Server(engine, layers).decode(1), theirs) > BOUND


def test_a_ragged_batch_counts_by_its_work(engine: Any, layers: list[Any]) -> None:
    policy = StubPolicy()
    install(policy)
    Server(engine, layers, (100, 20, 30)).decode(1)
    (asked,) = policy.asked
    assert asked[:4] == (100, 2, HEADS, "float32")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_halves_are_as_near_to_float32_as_the_engine(engine: Any, dtype: mx.Dtype) -> None:
    half = mla_layers(dtype)
    exact = mla_layers(dtype)
    for layer in exact:
        layer.set_dtype(mx.float32)
    server = Server(engine, half, dtype=dtype)
    truth = Server(engine, exact)
    truth.cache.latent_caches = [each.astype(mx.float32) for each in server.cache.latent_caches]
    x = mx.random.normal((1, len(RAGGED), HIDDEN), key=mx.random.key(9)).astype(dtype)

    def outputs(server: Server) -> mx.array:
        engine.set_context(server.context())
        server.lengths = [n - 1 for n in server.lengths]
        return mx.concatenate([each(x.astype(server.cache.dtype)) for each in server.wrapped])

    right, theirs = outputs(truth), outputs(server).astype(mx.float32)
    install(StubPolicy())
    ours = outputs(server).astype(mx.float32)
    assert stats().plans == {"split x2": LAYERS}
    assert mx.linalg.norm(ours - right) <= 1.05 * mx.linalg.norm(theirs - right)


def test_rows_of_one_request_are_rows(engine: Any, layers: list[Any]) -> None:
    """Drafts to verify come as rows that share a block table and see one token more each."""

    def verify() -> mx.array:
        server = Server(engine, layers, (40,))
        (table,) = server.tables
        slots = [table[n // BLOCK] * BLOCK + n % BLOCK for n in (40, 41, 42)]
        context = engine.PagedAttentionContext(
            slot_mapping=slots,
            block_tables=[table] * 3,
            context_lens=[41, 42, 43],
            offsets=[40, 41, 42],
            cu_seqlens=[0, 1, 2, 3],
        )
        return server.forward(context)

    theirs = verify()
    install(StubPolicy())
    assert distance([verify()], [theirs]) < BOUND
    assert stats().plans == {"split x2": LAYERS}


def test_padding_of_block_tables_is_never_read(engine: Any, layers: list[Any]) -> None:
    """The short sequence's row is filled up with block 0, which holds NaN here."""
    theirs = Server(engine, layers, (90, 5)).decode(1)
    install(StubPolicy())
    server = Server(engine, layers, (90, 5))
    used = {block for table in server.tables for block in table}
    server.cache = engine.MLAPagedLatentCache(LAYERS, WIDTH, len(used) + 1, BLOCK, mx.float32)
    spare = mx.full((1, BLOCK, WIDTH), mx.nan)
    fresh = Server(engine, layers, (90, 5)).cache.latent_caches
    server.cache.latent_caches = [mx.concatenate([spare, each]) for each in fresh]
    server.tables = [[block + 1 for block in table] for table in server.tables]
    for wrapper in server.wrapped:
        object.__setattr__(wrapper, "_mla_latent_cache", server.cache)
    assert distance(server.decode(1), theirs) < BOUND
    assert stats().routed == LAYERS


# --- the engine's own code, with a reason


def test_a_plan_of_mlx_is_the_engine_itself(engine: Any, layers: list[Any]) -> None:
    theirs = Server(engine, layers).decode()
    install(StubPolicy(MLX))
    assert distance(Server(engine, layers).decode(), theirs) == 0
    assert stats().routed == 0
    assert stats().reasons == {"the plan is mlx (tuned)": 3 * LAYERS}
    assert stats().look_ups == 3


def test_without_a_policy_that_of_the_process_decides(engine: Any, layers: list[Any]) -> None:
    install()
    Server(engine, layers).decode(1)
    assert stats().reasons == {"the plan is mlx (gates)": LAYERS}


def test_the_engines_own_kernel_runs_where_the_plan_is_mlx(
    engine: Any, layers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM_METAL_MLA_KERNEL keeps its meaning; off Apple that kernel raises."""
    monkeypatch.setattr(engine.envs, "VLLM_METAL_MLA_KERNEL", True)
    install(StubPolicy(MLX))
    with pytest.raises(RuntimeError):
        Server(engine, layers, dtype=mx.float16).decode(1)
    install(StubPolicy())
    Server(engine, layers, dtype=mx.float16).decode(1)
    assert stats().plans == {"split x2": LAYERS}


def test_a_prefill_in_the_batch(engine: Any, layers: list[Any]) -> None:
    def mixed() -> mx.array:
        server = Server(engine, layers, (40, 9))
        first, second = server.tables
        slots = [
            first[39 // BLOCK] * BLOCK + 39 % BLOCK,
            *(second[0] * BLOCK + n for n in (6, 7, 8)),
        ]
        context = engine.PagedAttentionContext(
            slot_mapping=slots,
            block_tables=[first, second],
            context_lens=[40, 9],
            offsets=[39, 6],
            cu_seqlens=[0, 1, 4],
        )
        return server.forward(context)

    theirs = mixed()
    install(StubPolicy())
    assert distance([mixed()], [theirs]) == 0
    assert stats().reasons == {"a prefill in the batch": LAYERS}


def test_training_mode_keeps_its_gradients(engine: Any) -> None:
    layers = [layer.train() for layer in mla_layers()]
    install(StubPolicy())
    Server(engine, layers).decode(1)
    assert stats().reasons == {"training mode": LAYERS}


def test_blocks_that_no_kernel_reads(engine: Any, layers: list[Any]) -> None:
    install(StubPolicy())
    Server(engine, layers, block=4).decode(1)
    assert stats().reasons == {"blocks of 4 tokens": LAYERS}


class Odd:
    """What the engine's gate is shown, without a forward around it."""

    def __init__(self, engine: Any, layers: list[Any], **changes: Any) -> None:
        self.server = Server(engine, layers)
        self.context = self.server.context()
        self.inner = layers[0]
        for name, value in changes.items():
            part, _, attribute = name.partition("__")
            setattr(getattr(self, part), attribute, value)

    @property
    def wrapper(self) -> Any:
        return self.server.wrapped[0]

    @property
    def cache(self) -> Any:
        return self.server.cache

    def asked(self) -> bool:
        return bool(self.wrapper._can_use_kernel(self.inner, self.cache, self.context))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"context__context_lens": mx.array([100, 17, 1, 64])}, "not known on the host"),
        ({"context__context_lens": [100, mx.array(17), 1, 64]}, "not known on the host"),
        ({"context__context_lens": [100, 17, 0, 64]}, "more rows or tokens than"),
        ({"context__context_lens": [100, 17, 1, 1 << 31]}, "more rows or tokens than"),
        ({"context__context_lens": [100, 17, 1]}, "a prefill in the batch"),
        ({"context__context_lens": [200, 17, 1, 64]}, "a block table that is too short"),
        ({"context__block_tables": [[1]]}, "ValueError in routing"),
        ({"context__cu_seqlens": None}, "TypeError in routing"),
        ({"context__kernel_metadata_cache": None}, "TypeError in routing"),
        ({"cache__dtype": mx.int8}, "dtype mlx.core.int8"),
        ({"cache__latent_dim": 577}, "a cache of width 577"),
        ({"cache__block_size": None}, "TypeError in routing"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_left_alone(
    engine: Any, layers: list[Any], changes: dict[str, Any], reason: str
) -> None:
    odd = Odd(engine, layers, **changes)
    install(StubPolicy())
    assert odd.asked() is False
    assert stats().routed == 0
    (counted,) = stats().reasons
    assert reason in counted


def test_an_attention_that_is_not_absorbed(engine: Any, layers: list[Any]) -> None:
    odd = Odd(engine, layers)
    object.__setattr__(odd.wrapper, "_is_absorbed", False)
    install(StubPolicy())
    assert odd.asked() is False
    assert stats().reasons == {"an attention that is not absorbed": 1}


def test_one_that_raises_when_it_is_evaluated_costs_no_request_either(
    engine: Any, layers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Server(engine, layers).decode()
    whole = vllm_routing.mla_decode

    def late(*arguments: Any, plan: Any = None, **options: Any) -> Any:
        if plan is None:
            return breaking_late(*arguments, **options)
        return whole(*arguments, plan=plan, **options)

    install(StubPolicy())
    monkeypatch.setattr(vllm_routing, "mla_decode", late)
    ours = Server(engine, layers).decode()
    assert distance(ours, theirs) < BOUND
    assert stats().routed == 0
    assert stats().reasons["the plan split x2 failed"] == 1


def test_a_kernel_that_raises_costs_no_request(
    engine: Any,
    layers: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = Server(engine, layers).decode()
    install(StubPolicy())
    whole, asked = vllm_routing.mla_decode, []

    def failing(*arguments: Any, plan: Any = None, **options: Any) -> Any:
        asked.append(plan)
        if plan is None:
            raise RuntimeError("no memory")
        return whole(*arguments, plan=plan, **options)

    monkeypatch.setattr(vllm_routing, "mla_decode", failing)
    with caplog.at_level(logging.WARNING, "mla_tuner"):
        ours = Server(engine, layers).decode()
    assert distance(ours, theirs) < BOUND
    install(StubPolicy())  # another policy does not mend it
    Server(engine, layers).decode(1)
    assert asked == [None, MLX]
    counts = stats()
    uninstall()
    install(StubPolicy())  # nor does it to begin anew
    Server(engine, layers).decode(1)
    assert asked == [None, MLX]
    assert caplog.messages == ["plan split x2 is not used again: no memory"]
    assert counts.routed == 0
    assert counts.reasons == {
        "the plan split x2 failed": 1,
        "the plan split x2 failed before": 4 * LAYERS - 1,
    }
