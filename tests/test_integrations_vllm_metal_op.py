"""vllm-metal's operation by our kernels: its arguments, its limits, its errors."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mla-tuner[mlx-lm]")

from serving_steps import StubPolicy

from mla_tuner import last_run
from mla_tuner.integrations.vllm_op import metal_mla_paged_attention
from mla_tuner.plan import MLX, Plan

ROWS, HEADS = 3, 4
LENGTHS = [70, 1, 33]


def arguments(dtype: mx.Dtype = mx.float16, block: int = 16, **changes: Any) -> dict[str, Any]:
    def random(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(len(shape) + shape[-1])).astype(dtype)

    width = -(-max(LENGTHS) // block)
    return {
        "q_nope": random(ROWS, HEADS, 512),
        "q_pe": random(ROWS, HEADS, 64),
        "latent_cache": random(ROWS * width, block, 576),
        "block_tables": mx.arange(ROWS * width, dtype=mx.int32).reshape(ROWS, width),
        "context_lens": mx.array(LENGTHS, dtype=mx.uint32),
        "cu_seqlens_q": mx.arange(ROWS + 1, dtype=mx.int32),
        "scale": 0.1,
        **changes,
    }


def truth(given: dict[str, Any]) -> mx.array:
    outs = []
    for row, length in enumerate(LENGTHS):
        tokens = given["latent_cache"][given["block_tables"][row]].reshape(-1, 576)[:length]
        tokens = tokens.astype(mx.float32)
        q = mx.concatenate([given["q_nope"][row], given["q_pe"][row]], axis=-1).astype(mx.float32)
        outs.append(mx.softmax(given["scale"] * q @ tokens.T, axis=-1) @ tokens[:, :512])
    return mx.stack(outs)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("plan", [Plan("single"), Plan("split", 2), MLX], ids=str)
def test_the_answer_is_right_by_every_path(dtype: mx.Dtype, block: int, plan: Plan) -> None:
    given = arguments(dtype, block)
    out = metal_mla_paged_attention(**given, plan=plan)
    mx.eval(out)
    ran = last_run()
    assert (out.shape, out.dtype) == ((ROWS, HEADS, 512), dtype)
    bound = 1e-2 if dtype == mx.bfloat16 else 2e-3
    if plan == MLX:  # it rounds the rope scores to halves
        bound *= 3
    assert mx.abs(out.astype(mx.float32) - truth(given)).max() < bound
    assert ran is not None
    assert ran.executed is not None
    assert (ran.executed.path, ran.executed.partitions) == (plan.path, plan.partitions)


def test_the_names_and_their_order_are_those_of_vllm_metal() -> None:
    names = inspect.signature(metal_mla_paged_attention).parameters
    assert list(names)[:8] == [*arguments(), "heads_per_tg"]


@pytest.mark.usefixtures("kernel")
def test_a_policy_decides_and_host_lengths_do() -> None:
    given = arguments(context_lens=LENGTHS)
    policy = StubPolicy(Plan("split", 2))
    out = metal_mla_paged_attention(**given, heads_per_tg=2, policy=policy)
    assert mx.array_equal(out, metal_mla_paged_attention(**arguments(), plan=Plan("split", 2)))
    assert policy.asked[0][:4] == (70, 1, HEADS, "float16")
    assert policy.asked[0][-1] == "paged"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"q_nope": mx.zeros((3, 4, 16)), "q_pe": mx.zeros((3, 4, 4)), "latent_cache": 20},
            "kv_lora_rank=512",
        ),
        (
            {"q_pe": mx.zeros((3, 4, 32)), "latent_cache": 544},
            "qk_rope_head_dim=64; got 512 and 32",
        ),
        ({"block": 8}, r"block_size in \{16, 32\}; got 8"),
        ({"heads_per_tg": 4}, r"heads_per_tg must be in \{1, 2\}; got 4"),
        (
            {"q_nope": mx.zeros((3, 5, 512)), "heads_per_tg": 2},
            "divisible by heads_per_tg=2; got 5",
        ),
        ({"q_pe": mx.zeros((3, 4, 64), mx.bfloat16)}, "must share the same dtype"),
        ({"dtype": mx.float32}, "expected float16 or bfloat16; got mlx.core.float32"),
    ],
)
def test_limits_raise_what_vllm_metal_raises(changes: dict[str, Any], says: str) -> None:
    width = changes.get("latent_cache")
    if isinstance(width, int):
        changes = {**changes, "latent_cache": mx.zeros((9, 16, width))}
    with pytest.raises(RuntimeError, match=says):
        metal_mla_paged_attention(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"latent_cache": mx.zeros((9, 16, 575))}, r"latent_cache of width 512 \+ 64; got 575"),
        ({"context_lens": [1, 2]}, "cache.lengths with 3 entries"),
        ({"block_tables": mx.zeros((3, 1), mx.int32)}, "5 or more columns"),
    ],
)
def test_what_does_not_fit_together_is_a_value_error(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        metal_mla_paged_attention(**arguments(**changes))
