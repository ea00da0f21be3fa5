"""FlashMLA, FlashAttention 3's MLA and vLLM's Triton decode, out of a wheel of vLLM 0.24.0.

Of vLLM itself nothing runs: small stand-ins take the places of the modules that these files import.
Each is called as vLLM calls it: FlashMLA's and FlashAttention's plans are made once for a cache and
used again, and Triton splits by vLLM's rule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mla_tuner.cases import SCALE

from .caches import Caches
from .choices import BLOCK_SIZE
from .unpack import FA3, FA3_LIBRARY, FLASH_MLA, FLASH_MLA_LIBRARY, TRITON

FA3_NAME, FLASH_MLA_NAME, TRITON_NAME = "FA3-MLA", "FlashMLA", "Triton"
FA3_UNPLANNED = "FA3-MLA unplanned"  # as it is called on its own: it plans in every call
TRITON_TOKENS, TRITON_BLOCKS = 512, 2  # vLLM's rule: least tokens of a split, most blocks a core

Call = Callable[[int], Any]  # of call k: the answer, `[batch, heads, q_len, kv_lora_rank]`
Maker = Callable[[Caches], Call]  # raises ValueError where the library can't do such a call


def load(folder: Path) -> tuple[dict[str, Maker], list[str]]:
    """What can be loaded from an unpacked wheel, and why the rest can't."""
    _stand_in()
    makers: dict[str, Maker] = {}
    reasons = []
    for name, loader in (
        (FA3_NAME, _fa3),
        (FLASH_MLA_NAME, _flash_mla),
        (TRITON_NAME, _triton),
    ):
        try:
            makers |= loader(folder)
        except Exception as error:  # one that can't be loaded must not stop the others
            reasons.append(f"{name} is left out: {type(error).__name__}: {error}")
    return makers, reasons


def _fa3(folder: Path) -> dict[str, Maker]:
    _library(folder / FA3_LIBRARY, "vllm.vllm_flash_attn._vllm_fa3_C")
    library = _module(folder / FA3, "vllm.vllm_flash_attn.flash_attn_interface")

    def make(caches: Caches, planned: bool) -> Call:
        torch, shape = import_module("torch"), caches.shape
        rank = shape.geometry.kv_lora_rank
        q_nope, q_pe = (
            part.flatten(0, 1).contiguous()  # [batch * q_len, heads, ...]
            for part in (caches.q[..., :rank], caches.q[..., rank:])
        )
        first = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * shape.q_len
        options: dict[str, Any] = {
            "max_seqlen_q": shape.q_len,
            "cu_seqlens_q": first,
            "max_seqlen_k": shape.context,
            "seqused_k": caches.lengths,
            "softmax_scale": SCALE,
            "causal": True,
            "fa_version": 3,
        }

        def plan() -> Any:
            return library.get_scheduler_metadata(
                batch_size=shape.batch,
                max_seqlen_q=shape.q_len,
                max_seqlen_k=shape.context,
                num_heads_q=shape.heads,
                num_heads_kv=1,
                headdim=shape.geometry.rope_dim,
                cache_seqlens=caches.lengths,
                qkv_dtype=caches.dtype,
                headdim_v=rank,
                page_size=BLOCK_SIZE,
                cu_seqlens_q=first,
                causal=True,
            )

        plans = [plan() if planned else None for _ in range(caches.count)]

        def call(k: int) -> Any:
            latent = caches.latents[k].unsqueeze(2)  # [blocks, 64, 1 head, ...]
            out = library.flash_attn_varlen_func(
                q=q_pe,
                k=latent[..., rank:],
                v=latent[..., :rank],
                q_v=q_nope,
                block_table=caches.tables[k],
                scheduler_metadata=plans[k],
                **options,
            )
            return out.unflatten(0, (shape.batch, shape.q_len)).transpose(1, 2)

        return call

    return {
        FA3_NAME: lambda caches: make(caches, planned=True),
        FA3_UNPLANNED: lambda caches: make(caches, planned=False),
    }


def _flash_mla(folder: Path) -> dict[str, Maker]:
    _library(folder / FLASH_MLA_LIBRARY, "vllm._flashmla_C")
    library = _module(folder / FLASH_MLA, "vllm.third_party.flashmla.flash_mla_interface")

    def make(caches: Caches) -> Call:
        shape = caches.shape
        plans = [library.get_mla_metadata()[0] for _ in range(caches.count)]

        def call(k: int) -> Any:
            out, _ = library.flash_mla_with_kvcache(
                caches.q,
                caches.latents[k].unsqueeze(2),
                caches.tables[k],
                caches.lengths,
                shape.geometry.kv_lora_rank,
                plans[k],
                softmax_scale=SCALE,
                causal=shape.q_len > 1,
            )
            return out.transpose(1, 2)

        return call

    return {FLASH_MLA_NAME: make}


def _triton(folder: Path) -> dict[str, Maker]:
    library = _module(folder / TRITON, "vllm.v1.attention.ops.triton_decode_attention")

    def make(caches: Caches) -> Call:
        torch, shape = import_module("torch"), caches.shape
        if shape.q_len > 1:
            raise ValueError("it takes one query a sequence")
        rank = shape.geometry.kv_lora_rank
        q = caches.q[:, 0]  # [batch, heads, width]
        cores = torch.cuda.get_device_properties(0).multi_processor_count
        splits = triton_splits(shape.context, cores)
        partial = torch.empty((shape.batch, shape.heads, splits, rank + 1), device="cuda")
        out = torch.empty((shape.batch, shape.heads, rank), dtype=caches.dtype, device="cuda")
        lse = torch.empty((shape.batch, shape.heads), dtype=caches.dtype, device="cuda")
        one = torch.ones((), device="cuda")  # made inside a call it could not be captured

        def call(k: int) -> Any:
            latent = caches.latents[k].unsqueeze(2)
            library.decode_attention_fwd(
                q,
                latent,
                latent[..., :rank],
                out,
                lse,
                caches.tables[k],
                caches.lengths,
                partial,
                splits,
                SCALE,
                BLOCK_SIZE,
                k_scale=one,
                v_scale=one,
                is_mla=True,
            )
            return out.unsqueeze(2)

        return call

    return {TRITON_NAME: make}


def triton_splits(context: int, cores: int) -> int:
    """Partitions as vLLM 0.24.0 chooses them for its Triton decode."""
    ideal = max(1, context // TRITON_TOKENS)
    return min(1 << (ideal - 1).bit_length(), TRITON_BLOCKS * cores)


def _stand_in() -> None:
    """Puts the modules that the files import in memory."""
    for name in ("vllm", "vllm.vllm_flash_attn"):
        _named(name).__path__ = []  # a package without files
    platform = SimpleNamespace(is_rocm=lambda: False)
    _named("vllm.platforms").__dict__["current_platform"] = platform
    try:
        triton = {"triton": import_module("triton"), "tl": import_module("triton.language")}
    except ImportError:  # then its own file says so
        triton = {}
    _named("vllm.triton_utils").__dict__.update(triton)


def _named(name: str) -> ModuleType:
    return sys.modules.setdefault(name, ModuleType(name))


def _library(path: Path, name: str) -> None:
    """Loads a compiled library's operators into PyTorch; `import` finds an empty module."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not there")
    import_module("torch").ops.load_library(str(path))
    _named(name)


def _module(path: Path, name: str) -> Any:
    """Loads a file as the module of that name."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not there")
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
