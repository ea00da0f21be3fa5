"""The front door: what it accepts, what it refuses, which plan it takes, and what it reports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mla_tuner import DenseCache, PagedCache, backends, last_run, mla_decode, ops
from mla_tuner.backends.mlx_paths import MlxBackend
from mla_tuner.cases import Case, check, make_case
from mla_tuner.plan import MLX, Decision, Plan
from mla_tuner.shapes import DEEPSEEK, Geometry, Shape

PAGED = Shape(100, 2, 5, "float32", lengths=(100, 40))
DENSE = replace(PAGED, layout="dense")


def call(case: Case, **changes: Any) -> Any:
    arguments = {
        "q_nope": case.q_nope,
        "q_pe": case.q_pe,
        "cache": case.cache,
        "scale": case.scale,
        "plan": MLX,
    }
    arguments |= changes
    return mla_decode(arguments.pop("q_nope"), arguments.pop("q_pe"), **arguments)


class StubPolicy:
    """Answers with one decision, and remembers what it was asked."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.asked: list[tuple[Any, ...]] = []

    def decide(self, *asked: Any) -> Decision:
        self.asked.append(asked)
        return self.decision


class Untouched(MlxBackend):
    """A back end that runs nothing and counts."""

    runs = 0

    def run(self, plan: Plan, call: backends.Call) -> Any:
        self.runs += 1
        raise AssertionError("ran")


# --- results


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", [PAGED, DENSE], ids=["paged", "dense"])
@pytest.mark.parametrize("plan", [MLX, Plan("mlx_rows"), Plan("single"), Plan("split", 2)], ids=str)
def test_every_path_answers_and_reports_itself(shape: Shape, plan: Plan) -> None:
    case = make_case(shape, strided=True)
    out, lse = call(case, plan=plan, return_lse=True)
    assert (out.shape, out.dtype) == ((2, 5, 1, 512), mx.float32)
    assert (lse.shape, lse.dtype) == ((2, 5, 1), mx.float32)
    assert check(case, out, lse, plan).ok
    found = last_run()
    assert found is not None
    assert (found.plan, found.decision.source) == (plan, "caller")
    assert found.executed is not None
    assert (found.executed.path, found.executed.partitions) == (plan.path, plan.partitions)


@pytest.mark.usefixtures("kernel")
def test_lse_only_when_asked() -> None:
    case = make_case(PAGED)
    for plan in (MLX, Plan("split", 2)):
        assert isinstance(call(case, plan=plan), mx.array)
        assert check(case, call(case, plan=plan), None, plan).ok


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("layout", ["paged", "dense"])
@pytest.mark.parametrize("plan", [MLX, Plan("single")], ids=str)
def test_no_rope_is_none_or_of_width_zero(layout: str, plan: Plan) -> None:
    case = make_case(Shape(70, 1, 3, "float32", Geometry(512, 0), layout=layout))
    assert case.q_pe is None
    caches = [case.cache]
    if isinstance(case.cache, DenseCache):
        caches.append(replace(case.cache, k_pe=mx.zeros((1, 1, 70, 0))))
    for cache in caches:
        for q_pe in (None, mx.zeros((1, 3, 1, 0))):
            assert check(case, call(case, q_pe=q_pe, cache=cache, plan=plan), None, plan).ok


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", [list, tuple, np.array], ids=["list", "tuple", "numpy"])
@pytest.mark.parametrize("plan", [MLX, Plan("split", 2)], ids=str)
def test_any_host_ints_are_lengths(kind: Callable[[Any], Any], plan: Plan) -> None:
    case = make_case(DENSE, starts=(2, 30))
    assert isinstance(case.cache, DenseCache)
    assert case.cache.starts is not None
    cache = replace(
        case.cache, lengths=kind(list(case.cache.lengths)), starts=kind(list(case.cache.starts))
    )
    assert check(case, call(case, cache=cache, plan=plan), None, plan).ok


def test_context_is_counted_from_the_starts() -> None:
    case = make_case(DENSE, starts=(2, 60))
    policy = StubPolicy(Decision(MLX, "tuned", "test"))
    call(case, plan=None, policy=policy)
    # effective batch: (100 + 40) / 100
    assert policy.asked == [(100, 1, 5, "float32", 1, DEEPSEEK, "dense")]


@pytest.mark.usefixtures("kernel")
def test_threads_share_the_op() -> None:
    cases = [make_case(replace(PAGED, heads=heads)) for heads in (1, 3, 5, 16)]
    plan, failures = Plan("split", 2), []

    def work(case: Case) -> None:
        for _ in range(20):
            with mx.stream(mx.new_stream(mx.cpu)):
                out, lse = call(case, plan=plan, return_lse=True)
                mx.eval(out, lse)
            failures.extend([] if (found := check(case, out, lse, plan)).ok else [found.reason])

    threads = [threading.Thread(target=work, args=[case]) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --- bad input


def paged(**changes: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {"cache": replace(case.cache, **changes)}


def latent(change: Callable[[mx.array], Any]) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {"cache": replace(case.cache, latent=change(case.cache.latent))}


def zeros(*shape: int) -> mx.array:
    return mx.zeros(shape)


NO_INTS = "cache.lengths as a sequence of host ints"
ANY_LAYOUT: dict[str, tuple[Callable[[Case], dict[str, Any]], str]] = {
    "q_nope is numpy": (lambda c: {"q_nope": np.array(c.q_nope)}, "q_nope as an mx.array; got nd"),
    "q_nope is None": (lambda c: {"q_nope": None}, "q_nope as an mx.array; got NoneType"),
    "q_nope has 3 dims": (
        lambda c: {"q_nope": c.q_nope[0]},
        r"q_nope \[batch, .*got \[5, 1, 512\]",
    ),
    "q_nope is int": (lambda c: {"q_nope": c.q_nope.astype(mx.int32)}, "q_nope in .*got .*int32"),
    "empty batch": (lambda c: {"q_nope": zeros(0, 5, 1, 512)}, r"batch 1..65536; got \[0, 5"),
    "too many sequences": (
        lambda c: {"q_nope": mx.broadcast_to(c.q_nope[:1], (65537, 5, 1, 512))},
        r"batch 1..65536; got \[65537, 5",
    ),
    "no heads": (lambda c: {"q_nope": zeros(2, 0, 1, 512)}, r"heads 1..128; got \[2, 0"),
    "too many heads": (lambda c: {"q_nope": zeros(2, 129, 1, 512)}, r"heads 1..128.*\[2, 129"),
    "no query": (lambda c: {"q_nope": zeros(2, 5, 0, 512)}, r"q_len 1..8.*got \[2, 5, 0"),
    "too many queries": (lambda c: {"q_nope": zeros(2, 5, 9, 512)}, r"q_len 1..8.*\[2, 5, 9"),
    "q_pe is a list": (lambda c: {"q_pe": [1.0]}, "q_pe as an mx.array; got list"),
    "q_pe is half": (lambda c: {"q_pe": c.q_pe.astype(mx.float16)}, "q_pe in .*32; got .*float16"),
    "q_pe of one head": (lambda c: {"q_pe": c.q_pe[:, :1]}, r"q_pe \[2, 5, 1, rope.*\[2, 1, 1, 64"),
    "unknown rank": (lambda c: {"q_nope": c.q_nope[..., :128]}, r"widths 512\+64.*got 128\+64"),
    "unknown rope": (lambda c: {"q_pe": c.q_pe[..., :32]}, r"widths 512\+64.*got 512\+32"),
    "cache is an array": (lambda c: {"cache": c.q_nope}, "cache as a PagedCache or a Dense.*array"),
    "latent is numpy": (latent(np.array), "cache.latent as an mx.array; got ndarray"),
    "latent is half": (latent(lambda x: x.astype(mx.float16)), "cache.latent in .*got .*float16"),
    "latent is narrow": (latent(lambda x: x[..., :96]), r"cache.latent \[.*96\]"),
    "latent is flat": (latent(lambda x: x.reshape(-1)), r"cache.latent \[.*got \[\d+\]"),
    "one length": (paged(lengths=[3]), r"cache.lengths with 2 entries.*got \[3\]"),
    "negative length": (paged(lengths=[3, -1]), r"lengths in 0..1073741824; got \[3, -1\]"),
    "length of 2^30 + 1": (
        paged(lengths=[3, (1 << 30) + 1]),
        r"lengths in 0.*; got \[3, 1073741825",
    ),
    "length of 2^80": (paged(lengths=[1 << 80, 3]), r"lengths in 0..1073741824; got \[12"),
    "length without end": (paged(lengths=[10**5000, 3]), "lengths in 0.*; got list of thousands"),
    "lengths are lists": (paged(lengths=[[3], [4]]), NO_INTS),
    "lengths are words": (paged(lengths="ab"), NO_INTS + "; got ab"),
    "lengths are one int": (paged(lengths=3), NO_INTS + "; got 3"),
    "lengths are None": (paged(lengths=None), NO_INTS + "; got None"),
    "lengths on the device": (paged(lengths=mx.array([3, 4])), "cache.lengths as host ints"),
    "a length on the device": (paged(lengths=[3, mx.array(4)]), NO_INTS),
    "scale is text": (lambda c: {"scale": "a"}, "scale as a number that float32 holds; got a"),
    "scale is None": (lambda c: {"scale": None}, "scale as a number that .*; got None"),
    "scale is NaN": (lambda c: {"scale": float("nan")}, "that float32 holds; got nan"),
    "scale is infinite": (lambda c: {"scale": float("-inf")}, "that float32 holds; got -inf"),
    "scale is a large float": (lambda c: {"scale": -1e300}, r"that float32 holds; got -1e\+300"),
    "scale is beyond float32": (lambda c: {"scale": 3.41e38}, "that float32 holds; got 3.41e"),
    "scale is a large int": (lambda c: {"scale": 10**400}, "that float32 holds; got 10000"),
    "scale is an endless int": (lambda c: {"scale": 10**5000}, "holds; got int of thousands"),
    "policy is an int": (lambda c: {"policy": 5, "plan": None}, "policy as a Policy; got int"),
    "policy is text": (lambda c: {"policy": "off", "plan": None}, "policy as a Policy; got str"),
    "plan is text": (lambda c: {"plan": "split"}, "plan as a Plan; got str"),
}
PAGED_ONLY: dict[str, tuple[Callable[[Case], dict[str, Any]], str]] = {
    "no blocks": (latent(lambda x: x[:0]), r"cache.latent of blocks.*got \[0, 32, 576\]"),
    "blocks of 4": (latent(lambda x: x[:, :4]), r"multiple of 8 tokens; got \[\d+, 4, 576\]"),
    "blocks of 0": (latent(lambda x: x[:, :0]), r"multiple of 8 tokens; got \[\d+, 0, 576\]"),
    "table is numpy": (
        paged(block_tables=np.zeros((2, 4), np.int32)),
        "cache.block_tables as an mx.array; got ndarray",
    ),
    "table is uint32": (
        paged(block_tables=mx.zeros((2, 4), mx.uint32)),
        "in .*int32; got .*uint32",
    ),
    "table of one row": (
        paged(block_tables=mx.zeros((1, 4), mx.int32)),
        r"cache.block_tables \[2, max_blocks\]; got \[1, 4\]",
    ),
    "table is flat": (paged(block_tables=mx.zeros((8,), mx.int32)), r"\[2, max_blocks\]; got \[8"),
    "rows missing": (
        paged(block_tables=mx.zeros((2, 3), mx.int32)),
        r"cache.block_tables with 4 or more columns for length 100 in blocks of 32; got \[2, 3\]",
    ),
    "length too large": (paged(lengths=[1 << 30, 1]), "cache.block_tables with .* or more columns"),
}
DENSE_ONLY: dict[str, tuple[Callable[[Case], dict[str, Any]], str]] = {
    "two latent heads": (
        latent(lambda x: mx.concatenate([x, x], axis=1)),
        r"cache.latent \[2, 1, tokens, 512\]; got \[2, 2, 100, 512\]",
    ),
    "latent of one sequence": (latent(lambda x: x[:1]), r"cache.latent \[2, 1, tok.*got \[1, 1,"),
    "no k_pe": (paged(k_pe=None), r"cache.k_pe \[2, 1, 100, 64\]; got None"),
    "k_pe is short": (paged(k_pe=zeros(2, 1, 99, 64)), r"\[2, 1, 100, 64\]; got \[2, 1, 99, 64"),
    "k_pe is half": (
        paged(k_pe=mx.zeros((2, 1, 100, 64), mx.float16)),
        "cache.k_pe in .*float32; got .*float16",
    ),
    "length too large": (paged(lengths=[101, 3]), r"buffer's 100 tokens; got \[101, 3\]"),
    "one start": (paged(starts=[0]), r"cache.starts with 2 entries.*got \[0\]"),
    "negative start": (paged(starts=[0, -2]), r"cache.starts in 0.*; got \[0, -2\]"),
    "start past the end": (paged(starts=[0, 41]), r"up to the lengths \[100, 40\]; got \[0, 41\]"),
}


def bad_inputs() -> list[Any]:
    tables = {"paged": (PAGED, PAGED_ONLY), "dense": (DENSE, DENSE_ONLY)}
    return [
        pytest.param(shape, change, message, id=f"{layout}: {name}")
        for layout, (shape, own) in tables.items()
        for name, (change, message) in (ANY_LAYOUT | own).items()
    ]


@pytest.mark.parametrize(("shape", "change", "message"), bad_inputs())
def test_bad_input_is_one_clear_error(
    shape: Shape,
    change: Callable[[Case], dict[str, Any]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, backend, before = make_case(shape), Untouched("cpu"), ops._last
    monkeypatch.setattr(ops, "_backend", lambda: backend)
    for _ in range(2):  # what was refused once is not remembered as good
        with pytest.raises(ValueError, match=rf"^\[mla_decode\] expected .*{message}"):
            call(case, **change(case))
    assert backend.runs == 0
    assert ops._last is before


@pytest.mark.parametrize("name", ["lengths", "starts"])
@pytest.mark.parametrize("kind", [float, complex, str, np.float64, lambda _: None])
def test_what_equals_an_int_is_no_int(name: str, kind: Callable[[int], Any]) -> None:
    """The checks are looked up by equality, and 60.0 == 60: good ints must not let it in."""
    case, good = make_case(DENSE, starts=(0, 0)), [60, 40] if name == "lengths" else [0, 0]
    for entries in (good, tuple(good), np.array(good)):
        mx.eval(call(case, cache=replace(case.cache, **{name: entries})))
    for wrong in ([kind(good[0]), good[1]], [good[0], kind(good[1])]):
        with pytest.raises(ValueError, match=rf"\[mla_decode\] expected cache.{name} as a sequ"):
            call(case, cache=replace(case.cache, **{name: wrong}))


def test_entries_that_passed_vouch_for_no_others() -> None:
    case = make_case(PAGED)
    for lengths in ((100, 40), (100.0, 40), (100, 40), (100, 40.0)):
        cache = replace(case.cache, lengths=lengths)
        if all(type(n) is int for n in lengths):
            mx.eval(call(case, cache=cache, plan=MLX))
        else:
            with pytest.raises(ValueError, match=NO_INTS):
                call(case, cache=cache, plan=MLX)


def test_a_list_of_lengths_is_read_at_every_call() -> None:
    case = make_case(PAGED)
    lengths = [100, 40]
    cache = replace(case.cache, lengths=lengths)
    call(case, cache=cache, plan=MLX)
    lengths[1] = 1 << 30
    with pytest.raises(ValueError, match=r"cache\.block_tables with"):
        call(case, cache=cache, plan=MLX)


def test_bools_count_as_the_ints_that_they_are() -> None:
    case = make_case(Shape(1, 1, 5, "float32"))
    for lengths in ([True], [np.True_ + 0], [1]):
        ops._passed.clear()
        cache = replace(case.cache, lengths=lengths)
        checked = ops._check(case.q_nope, case.q_pe, cache, backends.get("cpu"))
        assert [type(n) for n in (*checked.lengths, *checked.starts)] == [int, int]


# --- the choice of the plan


@pytest.mark.usefixtures("kernel")
def test_an_illegal_plan_of_the_caller_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(PAGED)
    with pytest.raises(ValueError, match=r"\[mla_decode\] expected a plan that can run.*tiles"):
        call(case, plan=Plan("single", 1, "r7"))
    monkeypatch.setattr(ops, "_backend", lambda: MlxBackend("metal"))
    with pytest.raises(ValueError, match="got split x2: no native kernel for metal"):
        call(case, plan=Plan("split", 2))


def test_a_decided_plan_that_cannot_run_falls_back() -> None:
    case = make_case(PAGED)
    policy = StubPolicy(Decision(Plan("single", 1, "r7"), "tuned", "fast once", 3.0, 2.0, 1.9, 2.1))
    assert check(case, call(case, plan=None, policy=policy), None, MLX).ok
    found = last_run()
    assert found is not None
    assert found.executed == found.plan == found.decision.plan == MLX
    assert found.decision.source == "tuned"
    assert found.decision.reason.startswith("single r7 can't run here (")
    assert "fast once" in found.decision.reason
    assert found.decision.expected_us is None  # it was another plan's


def test_the_policy_of_the_process_decides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLA_TUNER", "off")
    call(make_case(PAGED), plan=None)
    found = last_run()
    assert found is not None
    assert (found.plan, found.decision.source) == (MLX, "off")
    assert caplog.records == []


def test_no_table_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mla_tuner"):
        for _ in range(3):
            call(make_case(PAGED), plan=None)
    found = last_run()
    assert found is not None
    assert found.decision.source == "gates"
    assert len(caplog.records) == 1


# --- what ran


@pytest.mark.usefixtures("kernel")
def test_a_native_run_is_reported_once_evaluated() -> None:
    case = make_case(PAGED)
    first = call(case, plan=Plan("split", 2, "r16"))
    found = last_run()
    assert found is not None
    assert (found.executed, found.detail) == (None, {})
    mx.eval(first)
    found = last_run()
    assert found is not None
    assert found.executed == Plan("split", 2, "r16")
    assert found.detail["rows_per_task"] == 5
    assert found.detail["tasks"] == 3  # two pieces of 100 tokens, one of 40


@pytest.mark.usefixtures("kernel")
def test_a_later_call_overtakes() -> None:
    case = make_case(PAGED)
    first, second = call(case, plan=Plan("single")), call(case, plan=Plan("split", 2))
    mx.eval(second)
    assert last_run().executed.path == "split"  # type: ignore[union-attr]
    mx.eval(first)
    assert last_run().executed is None  # type: ignore[union-attr]


@pytest.mark.usefixtures("kernel")
def test_fewer_pieces_than_asked_are_reported() -> None:
    mx.eval(call(make_case(PAGED), plan=Plan("split", 64)))
    assert last_run().executed == Plan("split", 2, "r16")  # type: ignore[union-attr]


def test_nothing_ran_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_last", None)
    assert last_run() is None


@pytest.mark.usefixtures("kernel")
def test_paged_blocks_may_be_shared() -> None:
    """A prefix cache: two sequences with the same blocks, more tokens than the pool holds."""
    case = make_case(Shape(64, 1, 3, "float32"), poison=False)
    assert isinstance(case.cache, PagedCache)
    table = mx.concatenate([case.cache.block_tables] * 2)
    cache = PagedCache(case.cache.latent, table, (64, 64))
    twice = [mx.concatenate([q] * 2) for q in (case.q_nope, case.q_pe) if q is not None]
    for plan in (MLX, Plan("split", 2)):
        out = mla_decode(*twice, cache, scale=case.scale, plan=plan)
        for row in (out[:1], out[1:]):
            assert check(case, row, None, plan).ok
