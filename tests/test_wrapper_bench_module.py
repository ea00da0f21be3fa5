"""The synthetic attention module: the same maths as mlx-lm's, and a cache that is never copied."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mla_tuner import models, ops
from mla_tuner.errors import ModelError
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import GEOMETRIES, Geometry, Shape
from mla_tuner.wrapper_bench_module import (
    DenseState,
    Module,
    PagedState,
    flop,
    make_state,
    make_weights,
    weight_numbers,
)
from mla_tuner.wrapper_bench_widths import _KNOWN, Widths, widths_of

PLANS = [MLX, Plan("single"), Plan("split", 2)]
SMALL = Widths("small", 96, 0, 16, 24)
LOW = Widths("low", 96, 40, 16, 24)


def made(widths: Widths, shape: Shape, seed: int = 0) -> Module:
    return Module(widths, shape, make_weights(widths, shape, seed), make_state(shape, seed))


def inputs(widths: Widths, shape: Shape, seed: int = 9) -> mx.array:
    dims = (shape.batch, shape.q_len, widths.hidden_size)
    return mx.random.normal(dims, getattr(mx, shape.dtype), key=mx.random.key(seed))


def address(array: mx.array) -> int:
    """Where an evaluated array lies; nothing of it is held afterwards."""
    return int(np.asarray(array.view(mx.uint16)).__array_interface__["data"][0])


def buffers(module: Module) -> list[mx.array]:
    state = module.state
    if isinstance(state, PagedState) or state.k_pe is None:
        return [state.latent]
    return [state.latent, state.k_pe]


# --- maths ---------------------------------------------------------------------------------------


def theirs(widths: Widths, shape: Shape, module: Module) -> Any:
    """mlx-lm's attention of DeepSeek-V3 with the weights of a module."""
    from mlx_lm.models.deepseek_v3 import DeepseekV3Attention, ModelArgs

    config = {
        "hidden_size": widths.hidden_size,
        "num_attention_heads": shape.heads,
        "q_lora_rank": widths.q_lora_rank or None,
        "qk_nope_head_dim": widths.qk_nope_head_dim,
        "v_head_dim": widths.v_head_dim,
        "qk_rope_head_dim": shape.geometry.rope_dim,
        "kv_lora_rank": shape.geometry.kv_lora_rank,
    }
    attention = DeepseekV3Attention(ModelArgs.from_dict(config))
    weights = module._weights
    named = {"kv_a_proj_with_mqa": weights.kv_a, "o_proj": weights.out}
    named |= {"embed_q": weights.embed_q, "unembed_out": weights.unembed_out}
    if weights.q_a is None:
        named["q_proj"] = weights.q_b
    else:
        named |= {"q_a_proj": weights.q_a, "q_b_proj": weights.q_b}
    attention.load_weights([(f"{n}.weight", w) for n, w in named.items()], strict=False)
    return attention


@pytest.mark.skipif(not util.find_spec("mlx_lm"), reason="mlx-lm is not installed (extra: test)")
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("widths", [SMALL, LOW])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_step_is_that_of_mlx_lm(widths: Widths, q_len: int, plan: Plan) -> None:
    from mlx_lm.models.cache import KVCache

    shape = Shape(200, 2, 3, "float32", q_len=q_len, layout="dense")
    module, cache = made(widths, shape), KVCache()
    x, before = inputs(widths, shape), 200 - q_len
    state = module.state
    assert isinstance(state, DenseState)
    assert state.k_pe is not None
    cache.update_and_fetch(state.latent[:, :, :before] * 1, state.k_pe[:, :, :before] * 1)
    mask = cache.make_mask(q_len, return_array=True, window_size=None)
    want = theirs(widths, shape, module)(mx.fast.rms_norm(x, None, 1e-6), mask, cache)
    got = module(x, plan)
    mx.eval(got, want)
    run = ops.last_run()
    assert run is not None
    assert run.executed is not None
    assert (run.executed.path, run.executed.partitions) == (plan.path, plan.partitions)
    assert float(mx.abs(want).max()) > 0.05
    assert float(mx.abs(got - want).max()) < 1e-5


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_both_layouts_give_the_same_step(geometry: Geometry) -> None:
    """With equal numbers in both caches; the paged one lies in blocks in random order."""
    paged, dense = (
        Shape(150, 2, 3, "float32", geometry, 2, layout) for layout in ("paged", "dense")
    )
    weights, rank = make_weights(LOW, paged), geometry.kv_lora_rank
    blocks, buffers = PagedState(paged), DenseState(dense)
    flat = blocks.latent.reshape(-1, geometry.width)
    for row, table in enumerate(blocks._tables):
        slots = [block * 32 + at for block in table for at in range(32)][:150]
        tokens = flat[mx.array(slots)]
        buffers.latent[row, 0, :150] = tokens[:, :rank]
        if buffers.k_pe is not None:
            buffers.k_pe[row, 0, :150] = tokens[:, rank:]
    x = inputs(LOW, paged)
    answers = [
        Module(LOW, shape, weights, state)(x, plan)
        for shape, state in ((paged, blocks), (dense, buffers))
        for plan in PLANS
    ]
    for answer in answers[1:]:
        assert float(mx.abs(answer - answers[0]).max()) < 1e-5


def test_a_step_writes_its_tokens_and_no_others() -> None:
    for layout in ("paged", "dense"):
        module = made(SMALL, Shape(70, 2, 2, "float32", q_len=2, layout=layout))
        before = [array * 1 for array in buffers(module)]
        mx.eval(before, module(inputs(SMALL, module.shape), MLX))
        pairs = zip(before, buffers(module), strict=True)
        changed = [(a != b).any(axis=-1).sum().item() for a, b in pairs]
        assert set(changed) == {4}, layout


# --- the cache is written in place ---------------------------------------------------------------


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("layout", ["paged", "dense"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_never_copy_the_cache(layout: str, plan: Plan, batch: int) -> None:
    """Steps of two layers in one graph, twice each, as they are timed."""
    shape = Shape(256, batch, 2, "bfloat16", layout=layout)
    layers = [made(SMALL, shape, seed) for seed in (0, 1)]
    before = [address(array) for layer in layers for array in buffers(layer)]
    for _ in range(3):
        x = inputs(SMALL, shape)
        for layer in (*layers, *layers):
            x = layer(x, plan)
        mx.eval(x)
        assert [address(array) for layer in layers for array in buffers(layer)] == before


@pytest.mark.parametrize("layout", ["paged", "dense"])
def test_a_live_reference_costs_a_copy_which_the_address_shows(layout: str) -> None:
    module = made(SMALL, Shape(256, 1, 2, layout=layout))
    before = address(module.state.latent)
    held = module.state.latent if layout == "paged" else module.state.latent[:, :, :10]
    mx.eval(held, module(inputs(SMALL, module.shape), MLX))
    assert address(module.state.latent) != before
    del held


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("layout", ["paged", "dense"])
def test_a_step_takes_less_memory_than_a_cache(layout: str) -> None:
    shape = Shape(8192, 1, 2, layout=layout)
    module, x = made(SMALL, shape), inputs(SMALL, shape)
    mx.eval(x)
    for _ in range(2):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(module(x, Plan("split", 2)))
        assert mx.get_peak_memory() - before < shape.cache_bytes / 10


# --- widths --------------------------------------------------------------------------------------


def test_widths_are_those_of_known_models() -> None:
    names = {model.name for model in models.KNOWN}
    assert set(_KNOWN) <= names
    assert widths_of("deepseek-v3", 16) == Widths("DeepSeek-V3", 7168, 1536, 128, 128)
    assert widths_of(None, 16).name == "DeepSeek-V2-Lite"
    assert widths_of(None, 64).name == "DeepSeek-V3"
    with pytest.raises(ModelError, match=r"GLM-5 are not known by name: give its config\.json"):
        widths_of("GLM-5", 64)
    with pytest.raises(ModelError, match="unknown model"):
        widths_of("GPT-2", 12)


CONFIG = {
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 1024,
    "q_lora_rank": None,
    "qk_nope_head_dim": 96,
    "v_head_dim": 80,
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("low", [None, 512])
def test_widths_come_from_a_config(tmp_path: Path, nested: bool, low: int | None) -> None:
    config = {**CONFIG, "q_lora_rank": low}
    whole = {"hidden_size": 1, "text_config": config} if nested else config
    (tmp_path / "config.json").write_text(json.dumps(whole))
    for path in (tmp_path, tmp_path / "config.json"):
        assert widths_of(str(path), 8) == Widths(tmp_path.name, 1024, low or 0, 96, 80)


@pytest.mark.parametrize("value", [None, 0, -1, "128", 1.5])
@pytest.mark.parametrize("field", ["hidden_size", "qk_nope_head_dim", "v_head_dim"])
def test_a_config_without_a_width_is_named(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, field: value}))
    with pytest.raises(ModelError, match=rf"config\.json: expected {field} as a width; got"):
        widths_of(str(path), 8)


def test_operations_count_projections_and_attention() -> None:
    shape, widths = Shape(1000, 2, 16, q_len=2), Widths("m", 2048, 0, 128, 128)
    numbers = 2048 * (16 * 192 + 576) + 16 * 128 * 512 * 2 + 16 * 128 * 2048
    assert weight_numbers(widths, shape) == numbers
    assert flop(widths, shape) == shape.flop + 2 * numbers * 4
    low = widths._replace(q_lora_rank=512)
    assert weight_numbers(low, shape) == numbers + 512 * 2048 - (2048 - 512) * 16 * 192
