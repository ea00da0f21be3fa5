"""Model names and config.json files."""

from __future__ import annotations

import json

import pytest

from mla_tuner import models
from mla_tuner.errors import ModelError
from mla_tuner.models import Model, resolve
from mla_tuner.shapes import DEEPSEEK, GEOMETRIES, MAX_HEADS, Geometry

GOOD = {"num_attention_heads": 20, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "vocab_size": 7}


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "My-Model"
    folder.mkdir()

    def write(data) -> str:
        path = folder / "config.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return str(path)

    return write


def test_known_models_are_legal_and_unique():
    assert len({models._plain(model.name) for model in models.KNOWN}) == len(models.KNOWN)
    for model in models.KNOWN:
        assert 1 <= model.heads <= MAX_HEADS
        assert model.geometry in GEOMETRIES


@pytest.mark.parametrize(
    ("name", "heads", "geometry"),
    [
        ("DeepSeek-V3", 128, DEEPSEEK),
        ("deepseek v3", 128, DEEPSEEK),
        ("deepseek-ai/DeepSeek-V3.2", 128, DEEPSEEK),
        ("DEEPSEEK_R1", 128, DEEPSEEK),
        ("DeepSeek-V2-Lite", 16, DEEPSEEK),
        ("glm4.7flash", 20, DEEPSEEK),
        ("Moonlight-16B-A3B", 16, DEEPSEEK),
        ("kimi-k2", 64, DEEPSEEK),
        ("mistral-small-4", 32, Geometry(256, 64)),
        ("MiniCPM3-4B", 40, Geometry(256, 32)),
    ],
)
def test_names_ignore_case_and_punctuation(name, heads, geometry):
    found = resolve(name)
    assert (found.heads, found.geometry) == (heads, geometry)


def test_unknown_name_suggests_close_ones():
    with pytest.raises(ModelError, match=r"unknown model 'deepsek-v3'; did you mean DeepSeek-V3"):
        resolve("deepsek-v3")


def test_unknown_name_without_a_neighbour_lists_all():
    with pytest.raises(ModelError, match=r"give its config.json, or one of DeepSeek-V2-Lite, "):
        resolve("zzz")


@pytest.mark.parametrize("name", ["GLM-5.3-Flash", "DeepSeek-V4", "Kimi-K3", ""])
def test_a_newer_version_is_not_taken_for_an_older_one(name):
    with pytest.raises(ModelError):
        resolve(name)


def test_config_file_and_its_folder(config):
    path = config(GOOD)
    assert resolve(path) == Model("My-Model", 20, DEEPSEEK)
    assert resolve(path.removesuffix("/config.json")) == Model("My-Model", 20, DEEPSEEK)


@pytest.mark.parametrize("nested", ["text_config", "language_config", "llm_config"])
def test_nested_config(config, nested):
    path = config({"num_attention_heads": 99, nested: GOOD})
    assert resolve(path).heads == 20


def test_rope_free_model(config):
    assert resolve(config({**GOOD, "qk_rope_head_dim": 0})).geometry == Geometry(512, 0)


def without(field: str) -> dict[str, int]:
    return {name: value for name, value in GOOD.items() if name != field}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100000, "not JSON"),
        ("[1]", "expected a JSON object; got list"),
        ({}, "kv_lora_rank is missing: not a model with multi-head latent attention"),
        (without("num_attention_heads"), "num_attention_heads: field required$"),
        (without("qk_rope_head_dim"), "qk_rope_head_dim: field required$"),
        ({**GOOD, "num_attention_heads": "20"}, "num_attention_heads: .*; got '20'$"),
        ({**GOOD, "num_attention_heads": 0}, "num_attention_heads: .*; got 0$"),
        ({**GOOD, "num_attention_heads": 129}, "num_attention_heads: .*; got 129$"),
        ({**GOOD, "num_attention_heads": 20.5}, "num_attention_heads: .*; got 20.5$"),
        ({**GOOD, "kv_lora_rank": None}, "kv_lora_rank: .*; got None$"),
        ({**GOOD, "kv_lora_rank": 384}, r"384\+64 has no kernel; known: 512\+64, "),
        ({**GOOD, "qk_rope_head_dim": -1}, "qk_rope_head_dim: .*; got -1$"),
        ({"text_config": []}, "kv_lora_rank is missing"),
    ],
)
def test_bad_config_is_one_line_naming_file_and_field(config, data, message):
    path = config(data)
    with pytest.raises(ModelError, match=message) as caught:
        resolve(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_missing_config_file(tmp_path):
    with pytest.raises(ModelError, match=r"config.json: No such file"):
        resolve(str(tmp_path / "config.json"))
    with pytest.raises(ModelError, match=r"config.json: No such file"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["", " "])
def test_no_name(name):
    with pytest.raises(ModelError, match=r"expected the name of a model.*; got no text"):
        resolve(name)


def test_a_path_that_nobody_may_look_at_is_one_line(monkeypatch, tmp_path):
    with pytest.raises(ModelError, match=r"File name too long$"):
        resolve("x" * 5000)

    def denied(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.stat", denied)
    for name in ("config.json", "folder"):
        with pytest.raises(ModelError, match=f"{name}: Permission denied$"):
            resolve(str(tmp_path / name))


def test_binary_config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="not JSON"):
        resolve(str(path))
