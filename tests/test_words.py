"""What is counted has its noun in the singular where it is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import run
from share_tables import SPLIT, any_kernel, duel, table_of

import mla_tuner
from mla_tuner import share
from mla_tuner.shapes import Shape
from mla_tuner.words import counted

__all__ = ["any_kernel"]  # the fixture
PACKAGE = Path(mla_tuner.__file__).parent
NOUNS = (
    *("bucket", "call", "core", "device", "head", "kernel", "look-up", "measurement"),
    *("piece", "plan", "result", "round", "row", "run", "shape", "trial"),
)
# A value, perhaps an adjective, and more than one of something.
PLURAL = re.compile(rf"\}} (?:\w+ )?(?:{'|'.join(NOUNS)})s\b")
# Where it is never one, or no number.
OTHERS = {
    ("family.py", "} cores"),  # of a device that lends plans
    ("gates.py", "} cores"),  # more than a pass keeps busy
    ("gates.py", "} heads"),  # too many
    ("gates.py", "} pieces"),  # two or more
    ("findings.py", "} devices"),  # of which one is to be chosen
    ("mla_classes.py", "} heads"),  # a latent has one
    ("report.py", "} rows"),  # the name of a number
    ("shapes.py", "} heads"),  # the name of the next one
    ("share.py", "} heads"),
    ("share.py", "} pieces"),  # of 1024 tokens or more, in two or more
    ("jit.py", "} kernels"),  # of a back end
}


@pytest.mark.parametrize(("number", "text"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs")])
def test_counted(number: int, text: str) -> None:
    assert counted(number, "run") == text


def test_no_text_has_a_plural_of_its_own() -> None:
    paths = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.html")]
    found = {(path.name, text) for path in paths for text in PLURAL.findall(path.read_text())}
    assert found - OTHERS == set()


@pytest.mark.usefixtures("any_kernel")
def test_commands_say_what_they_did_to_one(tmp_path: Path) -> None:
    table = table_of(tmp_path / "a.db", duel(Shape(32768, 1, 16), SPLIT))
    path = str(share.write(table, tmp_path / "nvidia-sm90.json"))
    db, out = ("--db", str(tmp_path / "b.db")), str(tmp_path / "out")
    said = run("share", "import", path, *db).stdout
    assert said.startswith("1 bucket added, 0 known already\n")
    assert run("db", "rebuild", *db).stdout.startswith("1 plan derived from ")
    undone = run("share", "import", "--undo", table.devices[0].runs[0].id, *db).stdout
    assert undone.endswith(" is taken out: it had 1 bucket\n")
    assert run("share", "merge", f"{out}.json", path).stdout == f"{out}.json: 1 bucket of 1 run\n"
    merged = run("share", "merge", f"{out}.db", str(tmp_path / "a.db")).stdout
    assert merged == f"{out}.db: 2 measurements of 1 run\n"
