"""What `probe` tells: what works, why not what doesn't, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import FakeBackend, make_device

from mla_tuner import backends, overview
from mla_tuner.device import DEFAULT_CACHE_BYTES, MLX_VERSION, probe
from mla_tuner.evidence import Measurement
from mla_tuner.plan import MLX, Plan
from mla_tuner.shapes import Shape
from mla_tuner.store import Store


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_TUNER", "off")
    here = probe("cpu")
    found = overview.overview(here, tmp_path / "t.db")
    json.dumps(found)
    assert found["device"] == here.key
    cpu = next(row for row in found["backends"] if row["name"] == "cpu")  # type: ignore[attr-defined]
    able, reason = backends.get("cpu").available()
    assert (cpu["device"], cpu["native"], cpu["reason"]) == (True, able, "" if able else reason)
    assert bool(cpu["kernels"]) == able
    assert (found["self_check"] is not None, found["cost"] is None) == (able, able)
    assert found["environment"]["MLA_TUNER"] == "off"  # type: ignore[index]


def test_a_missing_kernel_has_a_reason_and_a_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        backends, "get", lambda name: FakeBackend("no compiler was found", name=name)
    )
    found = overview.overview(make_device(), tmp_path / "t.db")
    assert found["self_check"] is None
    assert "only the paths mlx and mlx_rows" in str(found["cost"])
    cpu = next(row for row in found["backends"] if row["name"] == "cpu")  # type: ignore[attr-defined]
    assert (cpu["native"], cpu["kernels"]) == (False, [])
    assert cpu["reason"] == "no compiler was found"


def test_an_absent_device_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview.device, "_gpu", lambda: ("", {}))
    found = overview.backend_facts("metal")
    assert (found["device"], found["native"]) == (False, False)
    assert str(found["reason"]).startswith("no metal device here")


def test_a_failing_self_check_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = FakeBackend(checked=(False, "single is wrong by 1e-1"), name="cuda")
    monkeypatch.setattr(backends, "get", lambda name: broken)
    found = overview.overview(make_device(), tmp_path / "t.db")
    assert found["self_check"] == {"ok": False, "reason": "single is wrong by 1e-1"}


def test_database_states(tmp_path: Path) -> None:
    path, device, backend = tmp_path / "t.db", make_device(), FakeBackend()
    none = {"plans": 0, "other_mlx": 0, "other_kernel": 0}
    missing = {"path": str(path), "exists": False, "problem": "", **none}
    assert overview.db_facts(path, device, backend) == missing
    assert not path.exists()
    made = (
        *((1024, "digest", MLX_VERSION), (2048, "digest", MLX_VERSION), (1024, "digest", "0.1")),
        *((3072, "digest", "0.1"), (4096, "an older one", MLX_VERSION)),
    )
    with Store(path) as store:
        for context, kernel, mlx in made:
            shape = Shape(context, 1, 16)
            run = store.start_run(device, kernel=kernel, software={"mlx": mlx})
            store.record(run, shape.bucket, [], [Measurement(shape, MLX, rounds=6, median_us=9.0)])
    found = overview.db_facts(path, device, backend)
    assert (found["plans"], found["other_mlx"], found["other_kernel"]) == (2, 1, 1)
    path.write_bytes(b"no database" * 999)
    spoilt = overview.db_facts(path, device, backend)
    assert (spoilt["plans"], spoilt["exists"]) == (0, True)
    assert str(spoilt["problem"]).endswith("is not used: file is not a database")
    folder = overview.db_facts(tmp_path, device, backend)
    assert folder["exists"] is False
    assert str(folder["problem"]).endswith("it is a folder")


def test_where_the_cache_size_comes_from() -> None:
    assert overview.cache_source(make_device())
    assert "largest known" in overview.cache_source(make_device(backend="metal"))
    assert overview.cache_source(make_device(132, "cuda")) == "driver"
    unknown = overview.cache_source(make_device(None, "cuda"))
    assert f"{DEFAULT_CACHE_BYTES >> 20} MB assumed" in unknown


def test_gpu_kernels_are_its_tiles_and_the_others_say_why_not() -> None:
    backend = FakeBackend(name="metal", refused=(Plan("single", 1, "r32"),))
    assert overview.kernels(backend) == ["r16"]
    assert overview.refused(backend) == ["single r32 is refused"]
