"""MLA decode of one sequence in PyTorch on the CPU, in the forms a person would write it.

    pip install '.[peers]'
    python -m tools.peers.torch_cpu --heads 16 --context 2048,32768 --dtype bfloat16 --threads 1,2

torch gets one dense, contiguous cache: easier than the shuffled pages that our kernel reads.
Every form takes q [rows, kv_lora_rank + rope_dim] and latent [tokens, kv_lora_rank + rope_dim] of
one dtype, and gives [rows, kv_lora_rank].
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

Form = Callable[[], Any]
MISSING = "torch is not installed: pip install 'mla-tuner[peers]'"
DTYPES = ("bfloat16", "float16", "float32")


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def tensor(values: Any, dtype: str) -> Any:
    """A torch tensor of `dtype` with the numbers of a float32 numpy array."""
    torch = importlib.import_module("torch")
    return torch.from_numpy(values).to(getattr(torch, dtype))


def forms(q: Any, latent: Any, rank: int, scale: float) -> dict[str, Form]:
    """Name of each form, and the call that runs it once. Set the threads with `set_threads`."""
    torch = importlib.import_module("torch")
    attention = torch.nn.functional.scaled_dot_product_attention
    values = latent[:, :rank]
    q4, k4 = q[None, None], latent[None, None]  # [1, 1, rows or tokens, width]

    def matmul() -> Any:  # rounds the scores to the cache's dtype
        scores = (q @ latent.T).float() * scale
        return torch.softmax(scores, -1).to(q.dtype) @ values

    def matmul_as_float32() -> Any:
        wide = latent.float()
        scores = (q.float() @ wide.T) * scale
        return (torch.softmax(scores, -1) @ wide[:, :rank]).to(q.dtype)

    def sdpa() -> Any:
        return attention(q4, k4, values[None, None], scale=scale)[0, 0]

    def sdpa_wide() -> (
        Any
    ):  # values as wide as keys take torch's fused kernel; the rope part is cut
        return attention(q4, k4, k4, scale=scale)[0, 0, :, :rank]

    named = {"torch matmul": matmul, "torch sdpa": sdpa, "torch sdpa, wide V": sdpa_wide}
    if q.dtype != torch.float32:
        named["torch matmul as float32"] = matmul_as_float32
    return {name: _without_grad(form) for name, form in named.items()}


# Per instruction set, what keeps PyTorch's libraries to it. MKL's own bfloat16 products were slower
# than its float32 ones on Emerald Rapids (2026-11-29): PyTorch gets the faster setting.
_HELD_TO = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}


def hold_to(isa: str) -> str:
    """Keep PyTorch to "avx512" (so no AMX) or "avx2"; before its first use. Returns what it set."""
    settings = _HELD_TO.get(isa, {})
    if settings and "torch" in sys.modules:
        raise RuntimeError("torch is loaded already, and has chosen its instructions")
    os.environ.update(settings)
    return " ".join(f"{name}={value}" for name, value in settings.items())


def set_threads(threads: int) -> None:
    importlib.import_module("torch").set_num_threads(threads)


def version() -> str:
    return str(importlib.import_module("torch").__version__)


def _without_grad(form: Form) -> Form:
    torch = importlib.import_module("torch")

    def run() -> Any:
        with torch.inference_mode():
            return form()

    return run


def _time(form: Form, seconds: float) -> list[float]:
    form()
    samples: list[float] = []
    while len(samples) < 3 or sum(samples) < seconds:
        start = time.perf_counter()
        form()
        samples.append(time.perf_counter() - start)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", default="2048,32768")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each form")
    parser.add_argument("--isa", choices=tuple(_HELD_TO), help="keep PyTorch to it")
    args = parser.parse_args()
    hold_to(args.isa or "")
    if not available():
        print(MISSING, file=sys.stderr)
        return 1
    torch = importlib.import_module("torch")
    kind, generator = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
    print("| context | threads | form | min ms | median ms |\n|---|---|---|---|---|")
    for context in map(int, args.context.split(",")):
        q, latent = (
            torch.randn(n, 576, generator=generator).to(kind) for n in (args.heads, context)
        )
        for threads in map(int, args.threads.split(",")):
            set_threads(threads)
            for name, form in forms(q, latent, 512, 192**-0.5).items():
                ms = [1e3 * t for t in _time(form, args.seconds)]
                print(
                    f"| {context} | {threads} | {name} "
                    f"| {min(ms):.3f} | {statistics.median(ms):.3f} |"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
