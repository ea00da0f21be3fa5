"""The main job on real input: tune a tiny grid, then serve from it in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mla_tuner import backends
from mla_tuner.device import probe
from mla_tuner.store import Store
from mla_tuner.tuner import default_buckets, tune

SERVE = """
import json, sys
import mlx.core as mx
import mla_tuner
from mla_tuner import ops, policy
from mla_tuner.caches import PagedCache

context, heads = 1024, 4
mx.set_default_device(mx.cpu if sys.argv[1] == "cpu" else mx.gpu)
table = policy.current()
decision = table.decide(context, 1, heads, "bfloat16")
blocks = mx.random.normal((context // 32, 32, 576)).astype(mx.bfloat16)
cache = PagedCache(blocks, mx.arange(context // 32, dtype=mx.int32)[None], [context])
query, rope = (mx.random.normal((1, heads, 1, n)).astype(mx.bfloat16) for n in (512, 64))
out = ops.mla_decode(query, rope, cache, scale=0.07)
mx.eval(out)
run = ops.last_run()
heavy = ("numpy", "optuna", "sqlite_utils", "pydantic", "click", "rich")
print(json.dumps({
    "source": run.decision.source, "reason": run.decision.reason,
    "decided": str(decision.plan), "asked": str(run.plan), "executed": str(run.executed),
    "heavy": [name for name in heavy if name in sys.modules],
}))
"""


GPUS = [name for name in ("metal", "cuda") if backends.get(name).available()[0]]


@pytest.mark.parametrize("name", ["cpu", *GPUS])
def test_a_new_process_runs_the_plan_that_was_tuned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name == "cpu":
        request.getfixturevalue("kernel")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the lock of this test alone
    device = probe(name)
    wanted = default_buckets([1024], [1], [2, 4], ["bfloat16"])
    with Store(tmp_path / "t.db") as store, mx.stream(mx.cpu if name == "cpu" else mx.gpu):
        summary = tune(store, device, wanted, budget_s=300.0, force=True)
        assert [row.bucket for row in summary.tuned] == wanted
        stored = summary.tuned[1]
        # By far: MLX's CPU build for Linux links a reference BLAS.
        assert stored.plan.native or sys.platform == "darwin"
        evidence = store.evidence(stored.bucket)
        assert {e["status"] for e in evidence} == {"ok"}
        # What was timed is what was asked for, plan by plan.
        for row in evidence:
            label = row["path"] + (f" x{row['partitions']}" if row["path"] == "split" else "")
            assert row["executed"] == f"{label} {row['tile']}".strip()
    done = subprocess.run(
        [sys.executable, "-c", SERVE, name],
        env={"MLA_TUNER_DB": str(tmp_path / "t.db"), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    served = json.loads(done.stdout)
    assert served["source"] == "tuned"
    assert served["reason"].startswith("tuned on this device ")
    assert served["decided"] == served["asked"] == served["executed"] == str(stored.plan)
    assert served["heavy"] == []
