"""What routing costs mlx-lm's host, and what it gains a model: `python -m tools.serving_cost`.

    cost   microseconds of Python that `install()` adds: to a step and a call of a model without
           MLA, and to each call of one with it, the first of a step and the others, by its class
           or by the function that classes share. Decisions come from a table of one row, and no
           kernel is evaluated
    speed  tokens/s of a DeepSeek-V3 model of two layers without the plan, with it, and with it as
           if the class were not recognised, in turns on the same cache; its buckets are tuned
           first, into a database of this run's own

`--json FILE` writes the figures and where they were measured. Needs mlx-lm. CPU alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, cast
from unittest import mock

import mlx.core as mx

from mla_tuner import device
from mla_tuner.errors import TunerError
from mla_tuner.integrations import mlx_lm, shared_attention
from mla_tuner.integrations.mla_classes import CLASSES
from mla_tuner.parse import count, duration
from mla_tuner.plan import Decision, Plan
from mla_tuner.policy import Policy
from mla_tuner.shapes import CONTEXT_GRID, Shape
from mla_tuner.store import Store
from mla_tuner.tuner import tune

CALLS = 200  # of a sample
LAYERS = 2
VOCABULARY = 256
Figures = dict[str, Any]

# Widths of an attention module as published for small models (Moonlight, DeepSeek-V2-Lite); the
# rest is as small as it can be.
CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 1 << 18,
    "first_k_dense_replace": LAYERS,  # MLX's CPU build has no experts in half precision
}


class OnePlan:
    """Decides for one plan, as a tuned table of one row would."""

    def __init__(self, plan: Plan) -> None:
        self.decision = Decision(plan, "tuned", "the benchmark says so", 1e3, speedup_low=1e6)

    def decide(self, *shape: object, **more: object) -> Decision:
        return self.decision


def model_of(hidden: int, heads: int, dtype: mx.Dtype) -> Any:
    """Random weights."""
    deepseek_v3: Any = import_module("mlx_lm.models.deepseek_v3")
    changes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads}
    mx.random.seed(7)
    model = deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict({**CONFIG, **changes}))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def kv_cache() -> Any:
    """mlx-lm's default cache, empty."""
    return import_module("mlx_lm.models.cache").KVCache()


def batch_cache() -> Any:
    """That of a server's batch, here of four sequences with 8000 tokens at most."""
    cache = import_module("mlx_lm.models.cache").BatchKVCache([0, 1, 2, 3])
    cache._idx = 8000
    return cache


def full_cache(tokens: int, dtype: mx.Dtype) -> list[Any]:
    """As after a prompt of that many tokens: computing one would take minutes."""
    caches = [kv_cache() for _ in range(LAYERS)]
    for at, cache in enumerate(caches):
        keys = mx.random.split(mx.random.key(at))
        mx.eval(
            cache.update_and_fetch(
                mx.random.normal((1, 1, tokens, 512), dtype, key=keys[0]),
                mx.random.normal((1, 1, tokens, 64), dtype, key=keys[1]),
            )
        )
    return caches


# --- cost ----------------------------------------------------------------------------------------


def microseconds(run: Callable[[], object], calls: int = CALLS) -> float:
    """Of one call, the least over some samples: what takes longer is another process."""
    run()
    best = inf
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, time.perf_counter() - started)
    return best / calls * 1e6


def mask_us(cache: Any) -> float:
    """Of the mask that a model asks for once a step."""
    return microseconds(lambda: cache.make_mask(1, return_array=False, window_size=None))


def cost() -> Figures:
    """See the module's text. Look-ups are those of ten steps."""
    model, cache, x = model_of(64, 4, mx.bfloat16), kv_cache(), mx.zeros((1, 1, 64), mx.bfloat16)
    cache.offset = 8000
    attention, policy = model.layers[0].self_attn, cast(Any, OnePlan(Plan("split", 2)))

    caches, plain, noted = (cache, batch_cache()), [inf, inf], [inf, inf]
    for _ in range(5):  # in turns: the machine may be slower in one of them
        plain = [min(known, mask_us(each)) for known, each in zip(plain, caches, strict=True)]
        with mlx_lm.patch(policy):
            noted = [min(known, mask_us(each)) for known, each in zip(noted, caches, strict=True)]
    with mlx_lm.patch(policy):
        router, kind = mlx_lm._router, next(k for k in CLASSES if k.module == "deepseek_v3")
        assert router

        def step() -> None:
            router.step(kind, attention, x, None, cache)

        def first() -> None:
            cache.offset += 1
            step()

        same, looked_up = microseconds(step), microseconds(first)
    return {
        "added to a step without MLA": noted[0] - plain[0],
        "added to a batched step without MLA": noted[1] - plain[1],
        "routing a call": same,
        "routing the first call of a step": looked_up,
        "look-ups a step": look_ups(policy),
        "added to a call without MLA": passed_us(),
        **function_us(policy),
    }


def passed_us() -> float:
    """What the function that classes share adds to a call that it passes on at once."""

    def stock(
        queries: Any, keys: Any, values: Any, cache: Any, scale: Any, mask: Any, sinks: Any = None
    ) -> None: ...

    ours = shared_attention._function(stock, lambda: None)
    best: dict[Callable[..., Any], float] = {}
    for _ in range(5):
        for each in (ours, stock):
            took = microseconds(
                partial(each, 1, 2, 3, cache=None, scale=1.0, mask=None), 10 * CALLS
            )
            best[each] = min(best.get(each, inf), took)
    return best[ours] - best[stock]


def function_us(policy: Any) -> Figures:
    """Of a call by the function: finding its step, and all that the host does beyond stock."""
    base: Any = import_module("mlx_lm.models.base")
    queries = mx.zeros((1, 16, 1, 512), mx.bfloat16)
    latent, mask = mx.zeros((1, 1, 8000, 512), mx.bfloat16), mx.zeros((1, 16, 1, 8000), mx.bfloat16)
    mx.eval(queries, latent, mask)
    router = shared_attention.FunctionRouter(policy)
    cache = kv_cache()
    cache.keys = latent
    asked = queries, latent, cache, 0.1, mask, None
    stock = (queries, latent, latent, *asked[2:])
    assert router.attend(*asked) is not None, router.stats
    return {
        "routing a call of the function": microseconds(lambda: router.function_step(*asked)),
        "added to a call of the function": microseconds(lambda: router.attend(*asked))
        - microseconds(lambda: base.scaled_dot_product_attention(*stock)),
    }


def look_ups(policy: Any) -> float:
    """Look-ups a step of a model, over ten steps."""
    model, cache = model_of(64, 4, mx.bfloat16), full_cache(100, mx.bfloat16)
    with mlx_lm.patch(policy):
        for _ in range(10):
            mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
        found = mlx_lm.stats()
    assert found.routed == 10 * LAYERS, found
    return found.look_ups / 10


# --- speed ---------------------------------------------------------------------------------------


def tuned_policy(shape: Shape, budget_s: float) -> Policy:
    """The policy of a database that holds the bucket of a shape and nothing else."""
    here = device.probe("cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuning.db"
        with Store(path) as store:
            tune(store, here, [shape.bucket], budget_s=budget_s, force=True)
        return Policy.load(path, here)


def tokens_per_s(model: Any, caches: Sequence[Any], count: int) -> float:
    """Of greedy decoding by mlx-lm's own loop; the cache is as it was afterwards."""
    generate_step: Any = import_module("mlx_lm.generate").generate_step
    ends, start = [], caches[0].offset
    steps = generate_step(mx.array([1]), model, max_tokens=count + 1, prompt_cache=list(caches))
    for _ in steps:
        ends.append(time.perf_counter())
    for cache in caches:
        cache.trim(cache.offset - start)
    return count / (ends[-1] - ends[0])


def speed(context: int, hidden: int, rounds: int, count: int, budget_s: float) -> Figures:
    """See the module's text: medians, and that of the ratio of each round."""
    shape = Shape(context, 1, 16, layout="dense")
    policy = tuned_policy(shape, budget_s)
    decision = policy.decide(context, 1, 16, "bfloat16", layout="dense")
    model, caches = model_of(hidden, 16, mx.bfloat16), full_cache(context, mx.bfloat16)
    recognised = {"routed": CLASSES, "by the function": ()}
    found: dict[str, list[float]] = {"stock": [], **{name: [] for name in recognised}}
    for _ in range(rounds):
        found["stock"].append(tokens_per_s(model, caches, count))
        for name, classes in recognised.items():
            with mock.patch.object(mlx_lm, "CLASSES", classes), mlx_lm.patch(policy):
                found[name].append(tokens_per_s(model, caches, count))
                stats = mlx_lm.stats()
            assert stats.stock == 0 < stats.routed, stats
    ratios = {
        name: [a / b for a, b in zip(found[name], found["stock"], strict=True)]
        for name in recognised
    }
    return {
        "shape": str(shape),
        "hidden": hidden,
        "plan": str(decision.plan),
        **{f"{name} tokens/s": median(each) for name, each in found.items()},
        "ratio": median(ratios["routed"]),
        "ratio by the function": median(ratios["by the function"]),
        "ratios": ratios["routed"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code; see above."""
    contexts = count(CONTEXT_GRID[0], CONTEXT_GRID[-1])  # others have no bucket to tune
    parser = argparse.ArgumentParser(prog="python -m tools.serving_cost", description=__doc__)
    parser.add_argument("--context", type=contexts, default=8192)
    parser.add_argument("--hidden", type=count(1, 1 << 16), default=2048)
    parser.add_argument("--rounds", type=count(1, 1000), default=5)
    parser.add_argument("--tokens", type=count(1, 1000), default=8, help="of a sample")
    parser.add_argument("--budget", type=duration, default=60.0, help="time for tuning")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        report(options)
    except (TunerError, OSError) as error:
        parser.exit(1, f"Error: {error}\n")
    return 0


def report(options: argparse.Namespace) -> None:
    """Print the figures, and write them where that is wanted."""
    device.use(device.probe("cpu"))
    found = {"device": device.probe("cpu").key, **device.software(), "cost": cost()}
    found["speed"] = speed(
        options.context, options.hidden, options.rounds, options.tokens, options.budget
    )
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
