"""Random calls in PyTorch on the GPU: queries, caches in pages at random places, and the truth."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any

from mla_tuner.cases import SCALE
from mla_tuner.shapes import Shape

from .choices import BLOCK_SIZE, blocks_of, some_of


class Caches:
    """`count` equal calls on distinct caches.

    q: `[batch, q_len, heads, kv_lora_rank + rope_dim]`; q_nope and q_pe: its parts, in the layout
    `[batch, heads, q_len, ...]`. latents: `[blocks, 64, kv_lora_rank + rope_dim]` each. tables:
    `[batch, columns]` each. lengths: `[batch]`. All contiguous.
    """

    def __init__(self, shape: Shape, count: int) -> None:
        """Raises torch.OutOfMemoryError."""
        torch = import_module("torch")
        torch.manual_seed(0)
        self.shape, self.count, self._torch = shape, count, torch
        self.dtype = getattr(torch, shape.dtype)
        rank, width = shape.geometry.kv_lora_rank, shape.geometry.width
        used = blocks_of(shape)
        self.blocks = sum(used)
        rows = (shape.batch, shape.q_len, shape.heads, width)
        self.q = torch.randn(rows, device="cuda").to(self.dtype)
        by_heads = self.q.transpose(1, 2)
        self.q_nope = by_heads[..., :rank].contiguous()
        self.q_pe = by_heads[..., rank:].contiguous()
        self.lengths = torch.tensor(shape.all_lengths, dtype=torch.int32, device="cuda")
        latent = torch.randn((self.blocks, BLOCK_SIZE, width), dtype=self.dtype, device="cuda")
        self.latents = [latent, *(latent.clone() for _ in range(count - 1))]
        self.tables = [self._table(used) for _ in range(count)]

    def _table(self, used: list[int]) -> Any:
        torch = self._torch
        ids = torch.randperm(self.blocks, device="cuda").to(torch.int32)
        table = torch.zeros((len(used), max(used)), dtype=torch.int32, device="cuda")
        for row, part in zip(table, ids.split(used), strict=True):
            row[: len(part)] = part
        return table

    def given(self, name: str, k: int) -> Any:
        """The tensor of call `k` for one of `stand_ins`, of the same shape and strides."""
        tensors = {
            "q_nope": self.q_nope,
            "q_pe": self.q_pe,
            "latent": self.latents[k],
            "block_table": self.tables[k],
        }
        return tensors[name]

    def error(self, out: Any) -> float:
        """Largest row relative L2 error of the last call, against float64 on some rows; NaN where
        there is one.

        out: `[batch, heads, q_len, kv_lora_rank]`.
        """
        errors = [
            (out[b, h].double() - truth).norm(dim=-1) / truth.norm(dim=-1)
            for (b, h), truth in self._truths.items()
        ]
        return float(self._torch.cat(errors).max())  # a NaN is its largest

    @cached_property
    def _truths(self) -> dict[tuple[int, int], Any]:
        """Of the last call, by sequence and head: `[q_len, kv_lora_rank]` in float64."""
        torch, shape, found = self._torch, self.shape, {}
        for b in some_of(shape.batch):
            length = shape.all_lengths[b]
            ids = self.tables[-1][b, : blocks_of(shape)[b]].long()
            tokens = self.latents[-1][ids].flatten(0, 1)[:length].double()
            for h in some_of(shape.heads):
                scores = self.q[b, :, h].double() @ tokens.T * SCALE  # [q_len, tokens]
                for j in range(shape.q_len):
                    scores[j, length - shape.q_len + 1 + j :] = -torch.inf
                values = tokens[:, : shape.geometry.kv_lora_rank]
                found[b, h] = torch.softmax(scores, -1) @ values
        return found
