"""Widths of an attention module's projections: by the model's name, or from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from .errors import ModelError
from .models import resolve


class Widths(NamedTuple):
    """What a module's weights are sized by, beside heads and the geometry of its cache.

    q_lora_rank: of the compressed query; 0 where the query is one projection.
    """

    name: str
    hidden_size: int
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int


# Published values: hidden_size, q_lora_rank, qk_nope_head_dim, v_head_dim.
_KNOWN = {
    name: widths
    for widths, names in (
        ((2048, 0, 128, 128), "DeepSeek-V2-Lite DeepSeek-Coder-V2-Lite Moonlight Kimi-VL"),
        ((2048, 1536, 128, 128), "Youtu-LLM-2B"),
        ((5120, 1536, 128, 128), "DeepSeek-V2 DeepSeek-V2.5 DeepSeek-Coder-V2"),
        ((7168, 1536, 128, 128), "DeepSeek-V3 DeepSeek-V3.1 DeepSeek-V3.2 DeepSeek-R1"),
        ((7168, 1536, 128, 128), "Kimi-K2 Kimi-K2.5"),
        ((6144, 1536, 128, 128), "LongCat-Flash"),
        ((2304, 0, 128, 128), "Kimi-Linear"),
        ((2048, 768, 192, 256), "GLM-4.7-Flash"),
        ((2560, 768, 64, 64), "MiniCPM3"),
    )
    for name in names.split()
}
SMALL, LARGE = "DeepSeek-V2-Lite", "DeepSeek-V3"  # where no model is named
FEW_HEADS = 32  # up to which that is the small one


def widths_of(model: str | None, heads: int) -> Widths:
    """The named model's; without one those of a DeepSeek model that has about as many heads.

    Raises:
        ModelError: one line: no such model, or one whose widths only its config.json tells.
    """
    if model is None:
        return _known(SMALL if heads <= FEW_HEADS else LARGE)
    found, path = resolve(model), Path(model)
    path = path / "config.json" if path.is_dir() else path
    return _read(path, found.name) if path.is_file() else _known(found.name)


def _known(name: str) -> Widths:
    if name not in _KNOWN:
        raise ModelError(f"the projections of {name} are not known by name: give its config.json")
    return Widths(name, *_KNOWN[name])


def _read(path: Path, name: str) -> Widths:
    """From the level of a config.json that `resolve` took heads and geometry from."""
    data = json.loads(path.read_bytes())
    levels = [data, *(value for value in data.values() if isinstance(value, dict))]
    config = next(level for level in levels if level.get("kv_lora_rank") is not None)
    values = []
    for field in Widths._fields[1:]:
        least = field != "q_lora_rank"  # which is null where there is none
        value = config.get(field) if least else config.get(field) or 0
        if type(value) is not int or value < least:
            raise ModelError(f"{path}: expected {field} as a width; got {value!r}")
        values.append(value)
    return Widths(name, *values)
