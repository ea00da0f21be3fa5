"""The short form of `python -m tools.faults`: a few kills, and a small crowd."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.faults import work
from tools.faults.fire import crowd, kill_runs


def test_a_killed_run_loses_no_finished_bucket_and_can_be_resumed(tmp_path: Path) -> None:
    done = kill_runs(tmp_path, 5, heads=(8,))
    assert (done.kills, done.lost, done.damaged) == (5, 0, 0)


@pytest.mark.parametrize("version_1", [False, True])
def test_processes_share_a_fresh_database(version_1: bool, tmp_path: Path) -> None:
    """They tune, serve, check and rebuild, and whoever comes first makes or migrates the tables."""
    found = crowd(tmp_path, 4, version_1=version_1)
    assert (found.errors, found.sound) == (0, True)
    assert found.plans == found.expected == len(work.buckets_of((1, 2)))
