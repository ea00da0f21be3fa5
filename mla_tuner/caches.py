"""The two cache layouts that `mla_decode` reads: plain values, checked at the op's front door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


# eq=False: comparing arrays element by element is never what `==` on a cache means.
@dataclass(frozen=True, eq=False)
class PagedCache:
    """Blocks of cached tokens behind a table (vllm-metal's layout).

    latent: `[blocks, block_size, kv_lora_rank + rope_dim]`, block_size a multiple of 8.
    block_tables: `[batch, max_blocks]` int32 block ids; entries past a sequence's end are not read.
        An id of no block is found on the device: evaluating the CPU kernel raises, the GPU kernels
        and the MLX paths answer that sequence with NaN.
    lengths: cached tokens of each sequence, the new ones included; host ints, `batch` of them.
    """

    latent: mx.array
    block_tables: mx.array
    lengths: Sequence[int]


@dataclass(frozen=True, eq=False)
class DenseCache:
    """Two arrays, usually slices of a longer buffer (mlx-lm's layout); any strides, never copied.

    The Metal kernels load 16 bytes at once: there the last dimension must be contiguous and rows
    begin at steps of 16 bytes, else the answer is NaN.

    latent: `[batch, 1, T, kv_lora_rank]`.
    k_pe: `[batch, 1, T, rope_dim]`, or None where rope_dim is 0.
    lengths: end of each sequence in its row, in tokens, the new ones included; host ints.
    starts: first attended token of each sequence (left padding); None means 0 for all.
    """

    latent: mx.array
    k_pe: mx.array | None
    lengths: Sequence[int]
    starts: Sequence[int] | None = None


Cache = PagedCache | DenseCache
