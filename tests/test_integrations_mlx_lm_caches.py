"""mlx-lm's caches through the tuned plan: rotating ones, saved ones, and as mlx-lm generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from mlx_lm.models import cache as caches
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from serving_steps import (
    BOUND,
    KINDS,
    PROMPT,
    StubPolicy,
    attentions,
    batched,
    decode,
    distance,
    generated,
    padded,
    rotating,
    rotating_batch,
    spoken,
    tokens,
)
from tiny_models import CONFIGS, tiny_model

from mla_tuner.integrations import spans
from mla_tuner.integrations.mlx_lm import patch, stats

pytestmark = pytest.mark.usefixtures("kernel", "stock_mlx_lm")

FAMILIES = [
    pytest.param(name, marks=[pytest.mark.slow] * name.startswith("kimi"))  # mx.compile takes long
    for name in CONFIGS
]
ROTATED = "padding in the middle of a rotated cache"
PADDED = "a token of padding among the new ones"


# --- rotating: two more tokens than the prompt has fit in

ROTATING = {
    "one at a time": (1, rotating, (1, 1, 1, 1)),
    "several while there is room": (1, rotating, (2, 1, 1)),
    "several as it fills": (1, rotating, (8, 1, 1)),
    "several when it is full": (1, rotating, (1, 1, 1, 2, 1, 8, 3, 1, 1)),
    "a batch one at a time": (3, rotating_batch([0, 0, 0]), (1, 1, 1, 1)),
    "a batch, several": (3, rotating_batch([0, 0, 0]), (2, 1, 1, 8, 1, 2, 3, 1)),
    "a padded batch, several": (3, rotating_batch([7, 0, 40]), (2, 8, 3, 8)),
}


@pytest.mark.parametrize("case", ROTATING)
def test_a_rotating_cache_before_and_after_it_is_full(case: str, deepseek: Any) -> None:
    theirs = decode(deepseek, *ROTATING[case])
    with patch(StubPolicy()):
        ours = decode(deepseek, *ROTATING[case])
    assert distance(ours, theirs) < BOUND
    assert stats().plans == {"split x2": 2 * len(ROTATING[case][2])}
    assert stats().look_ups <= len(ROTATING[case][2])


@pytest.mark.parametrize("convert", [rotating, rotating_batch([0, 0])])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_a_rotating_cache(name: str, convert: Callable[[Any], Any]) -> None:
    model, case = tiny_model(name), (2, convert, (1, 4, 1, 2))
    theirs = decode(model, *case)
    with patch(StubPolicy()):
        ours = decode(model, *case)
    assert distance(ours, theirs) < BOUND
    assert stats().routed == 4 * len(attentions(model, KINDS[name]))


def test_a_padded_row_is_left_alone_while_its_padding_is_in_the_middle(deepseek: Any) -> None:
    case = 3, rotating_batch([0, 2, 4]), (1,) * 8
    theirs = decode(deepseek, *case)
    with patch(StubPolicy()):
        ours = decode(deepseek, *case)
    assert distance(ours, theirs) < BOUND
    assert stats().reasons == {"prefill": 2, ROTATED: 2 * 3}
    assert stats().routed == 2 * 5


def test_each_query_under_a_window_is_a_call_of_its_own(deepseek: Any) -> None:
    policy = StubPolicy()
    with patch(policy):
        decode(deepseek, 1, rotating, (8,))
    assert [asked[:2] + asked[4:5] for asked in policy.asked] == [(PROMPT + 2, 1, 1)]
    span = spans.Span((10, 10), (0, 5), window=8)
    assert span.queries(3) == [
        spans.Span((8, 8), (0, 5)),
        spans.Span((9, 9), (1, 5)),
        spans.Span((10, 10), (2, 5)),
    ]


def test_padding_is_read_where_it_is_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without MLA does not wait for its device."""

    class Unread:
        def tolist(self) -> list[int]:
            raise AssertionError("the device was waited for")

    cache = caches.BatchKVCache([2, 0])
    cache.update_and_fetch(*[mx.zeros((2, 1, 4, 1))] * 2)
    with patch(StubPolicy()):
        mask = cache.make_mask(1)
        assert spans.seen_mask(cache, 1, mask) is not None
        cache.left_padding = Unread()
        monkeypatch.setattr(caches, "create_causal_mask", lambda *asked, **options: mask)
        assert cache.make_mask(1) is mask


@pytest.mark.parametrize("name", spans.CACHES)
def test_this_releases_masks_are_known(name: str) -> None:
    assert spans.masks_as_known(getattr(caches, name))


@pytest.mark.parametrize("name", spans.CACHES)
def test_masks_that_allow_one_token_less_are_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = getattr(caches, name)
    known = kind.make_mask

    def other(cache: Any, *asked: Any, **options: Any) -> Any:
        mask = known(cache, *asked, **options)
        return mask.at[..., -1].multiply(False) if isinstance(mask, mx.array) else mask

    monkeypatch.setattr(kind, "make_mask", other)
    assert not spans.masks_as_known(kind)


# --- saved

SAVED = {
    "KVCache": (1, None),
    "BatchKVCache": (3, padded([7, 0, 40])),
    "RotatingKVCache": (1, rotating),
}


def from_a_file(
    model: Any, cache: list[Any], batch: int, q_lens: tuple[int, ...], folder: Path
) -> Callable[[], list[mx.array]]:
    """The logits of steps that go on where a prompt was saved."""
    file = str(folder / "cache.safetensors")
    model(tokens(batch, PROMPT), cache=cache)
    save_prompt_cache(file, cache)

    def steps() -> list[mx.array]:
        loaded = load_prompt_cache(file)
        return [
            model(tokens(batch, q_len, seed=at), cache=loaded) for at, q_len in enumerate(q_lens)
        ]

    return steps


@pytest.mark.parametrize("kind", SAVED)
def test_a_prompt_cache_from_a_file_goes_on(kind: str, deepseek: Any, tmp_path: Path) -> None:
    batch, convert = SAVED[kind]
    cache = [convert(each) if convert else each for each in make_prompt_cache(deepseek)]
    assert type(cache[0]).__name__ == kind
    steps = from_a_file(deepseek, cache, batch, (1, 3, 1), tmp_path)
    theirs = steps()
    with patch(StubPolicy()):
        ours = steps()
    assert distance(ours, theirs) < BOUND
    assert stats().plans == {"split x2": 6}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_goes_on_from_a_file(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    steps = from_a_file(model, make_prompt_cache(model), 1, (1, 1, 1), tmp_path)
    theirs = steps()
    with patch(StubPolicy()):
        ours = steps()
    assert distance(ours, theirs) < BOUND
    assert stats().routed == 3 * len(attentions(model, KINDS[name]))


def test_a_cache_goes_on_where_it_was_cut(deepseek: Any) -> None:
    cache = make_prompt_cache(deepseek)
    with patch(StubPolicy()):
        generated(deepseek, prompt_cache=cache)
        for each in cache:
            each.trim(3)
        after = deepseek(tokens(1, 1), cache=cache)
    for each in cache:
        each.trim(1)
    assert distance([after], [deepseek(tokens(1, 1), cache=cache)]) < BOUND


# --- as mlx-lm generates


@pytest.mark.parametrize("options", [{}, {"max_kv_size": PROMPT + 2}])
def test_generate_step(options: dict[str, int], deepseek: Any) -> None:
    theirs = generated(deepseek, **options)
    with patch(StubPolicy()):
        assert generated(deepseek, **options) == theirs
    assert stats().routed >= 10
    assert set(stats().reasons) == {"prefill"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_generates(name: str) -> None:
    model = tiny_model(name)
    theirs = generated(model), batched(model)
    with patch(StubPolicy()):
        assert (generated(model), batched(model)) == theirs
    assert stats().routed >= 20
    assert set(stats().reasons) <= {"prefill", PADDED}


def test_a_draft_model_is_verified_through_the_plan(deepseek: Any) -> None:
    draft = tiny_model("deepseek_v3", num_hidden_layers=1)
    theirs = spoken(deepseek, draft)
    policy = StubPolicy()
    with patch(policy):
        assert spoken(deepseek, draft) == theirs
    assert stats().routed > 0
    assert set(stats().reasons) == {"prefill"}
    assert {asked[4] for asked in policy.asked} > {1}  # q_len of verifying


@pytest.mark.parametrize(("options", "routed"), [({}, 20), ({"max_kv_size": 96}, 10)])
def test_ragged_requests_that_come_and_go(
    options: dict[str, int], routed: int, deepseek: Any
) -> None:
    """Fewer of them under a maximal size, where padding turns up in the middle."""
    theirs = batched(deepseek, **options)
    with patch(StubPolicy()):
        assert batched(deepseek, **options) == theirs
    assert set(stats().reasons) <= {"prefill", ROTATED}
    assert stats().routed >= routed
