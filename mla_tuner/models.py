"""Heads and geometry of MLA models: by name, or from a Hugging Face config.json."""

from __future__ import annotations

import difflib
import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import ModelError
from .shapes import DEEPSEEK, GEOMETRIES, MAX_HEADS, Geometry


@dataclass(frozen=True)
class Model:
    """What tuning needs to know of a model: query heads on one device, and its geometry."""

    name: str
    heads: int
    geometry: Geometry


# Published values. A model that is not listed here works through its config.json.
KNOWN = tuple(
    Model(name, heads, geometry)
    for heads, geometry, names in (
        (16, DEEPSEEK, "DeepSeek-V2-Lite DeepSeek-Coder-V2-Lite Moonlight Kimi-VL Youtu-LLM-2B"),
        (128, DEEPSEEK, "DeepSeek-V2 DeepSeek-V2.5 DeepSeek-Coder-V2"),
        (128, DEEPSEEK, "DeepSeek-V3 DeepSeek-V3.1 DeepSeek-V3.2 DeepSeek-R1"),
        (64, DEEPSEEK, "Kimi-K2 Kimi-K2.5 GLM-5 GLM-5.1 GLM-5.2 LongCat-Flash"),
        (32, DEEPSEEK, "Kimi-Linear JoyAI-LLM-Flash"),
        (20, DEEPSEEK, "GLM-4.7-Flash"),
        (32, Geometry(256, 64), "Mistral-Small-4"),
        (40, Geometry(256, 32), "MiniCPM3"),
    )
    for name in names.split()
)
# Other spellings people and repositories use.
_ALIASES = {
    "Moonlight-16B-A3B": "Moonlight",
    "Kimi-Linear-48B-A3B": "Kimi-Linear",
    "MiniCPM3-4B": "MiniCPM3",
    "Youtu-LLM": "Youtu-LLM-2B",
}
# Multimodal configs keep the language model's fields one level down.
_NESTED = ("text_config", "language_config", "llm_config")


class _Config(BaseModel):
    """The fields that are read from config.json."""

    model_config = ConfigDict(strict=True, extra="ignore")

    num_attention_heads: int = Field(ge=1, le=MAX_HEADS)
    kv_lora_rank: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=0)


def resolve(name_or_path: str) -> Model:
    """The model of that name, or the one that a config.json (or the folder holding it) describes.

    Case, punctuation and a leading "organisation/" do not matter in names. Raises ModelError with
    one line that names the file and field, or the closest known names.
    """
    if not name_or_path.strip():
        raise ModelError("expected the name of a model, or its config.json; got no text")
    path = Path(name_or_path)
    mode = _mode(path)
    if stat.S_ISDIR(mode):
        path = path / "config.json"
        mode = _mode(path)
    if stat.S_ISREG(mode) or path.suffix == ".json":
        return _read_config(path)
    by_name = {_plain(model.name): model for model in KNOWN}
    by_name |= {_plain(alias): by_name[_plain(name)] for alias, name in _ALIASES.items()}
    found = by_name.get(_plain(name_or_path.rsplit("/", 1)[-1]))
    if found is None:
        raise ModelError(_unknown(name_or_path, by_name))
    return found


def _mode(path: Path) -> int:
    """What lies at a path; 0 where nothing does."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _unknown(name: str, by_name: dict[str, Model]) -> str:
    close = difflib.get_close_matches(_plain(name.rsplit("/", 1)[-1]), by_name, n=3, cutoff=0.5)
    names = dict.fromkeys(by_name[match].name for match in close)
    if names:
        return f"unknown model {name!r}; did you mean {' or '.join(names)}? Or give its config.json"
    known = ", ".join(model.name for model in KNOWN)
    return f"unknown model {name!r}; give its config.json, or one of {known}"


def _read_config(path: Path) -> Model:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object; got {type(data).__name__}")
    levels = [data, *(data[name] for name in _NESTED if isinstance(data.get(name), dict))]
    level = next((level for level in levels if level.get("kv_lora_rank") is not None), data)
    try:
        config = _Config.model_validate(level)
    except ValidationError as error:
        raise ModelError(f"{path}: {_first(error)}") from error
    geometry = Geometry(config.kv_lora_rank, config.qk_rope_head_dim)
    if geometry not in GEOMETRIES:
        known = ", ".join(str(each) for each in GEOMETRIES)
        raise ModelError(
            f"{path}: kv_lora_rank + qk_rope_head_dim {geometry} has no kernel; known: {known}"
        )
    return Model(path.resolve().parent.name, config.num_attention_heads, geometry)


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    for each in error.errors():
        if each["loc"] == ("kv_lora_rank",) and each["type"] == "missing":
            return "kv_lora_rank is missing: not a model with multi-head latent attention"
    field = ".".join(str(part) for part in problem["loc"])
    got = "" if problem["type"] == "missing" else f"; got {problem['input']!r}"
    return f"{field}: {problem['msg'].lower()}{got}"
