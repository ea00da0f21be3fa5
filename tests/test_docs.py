"""The documentation names everything that users can reach, and its example runs."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import mla_tuner
from mla_tuner import answers, cli
from mla_tuner.shapes import GEOMETRIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        yield f"{path}{name}", command


COMMANDS = dict([("", cli.main), *commands(cli.main)])


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_have_help_and_are_documented(name: str) -> None:
    assert COMMANDS[name].help
    assert f"mla-tune {name}".strip() in README or f"`{name}`" in README
    assert name in CONFIGURATION


@pytest.mark.parametrize("name", COMMANDS)
def test_options_have_help_and_are_documented(name: str) -> None:
    for param in COMMANDS[name].params:
        assert isinstance(param, click.Option)
        assert param.help, param.opts
        assert param.opts[-1] in CONFIGURATION, param.opts


def test_documented_options_exist() -> None:
    known = {opt for command in COMMANDS.values() for param in command.params for opt in param.opts}
    for page in (README, CONFIGURATION, (ROOT / "docs" / "tuning.md").read_text()):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) - {"--help", "--table"}
        assert named <= known


def sources() -> Iterator[tuple[Path, str]]:
    for folder, pattern in (("mla_tuner", "*.py"), ("csrc", "*.cpp"), ("csrc", "*.h")):
        for path in (ROOT / folder).rglob(pattern):
            yield path, path.read_text()


def test_environment_variables_are_documented() -> None:
    used = {
        name for _, text in sources() for name in re.findall(r'"(MLA_TUNER(?:_[A-Z]+)*)"', text)
    }
    assert used >= {"MLA_TUNER", "MLA_TUNER_DB", "MLA_TUNER_THREADS"}
    assert all(f"`{name}`" in CONFIGURATION for name in used)


def test_geometries_are_documented() -> None:
    assert all(f"`{geometry}`" in CONFIGURATION for geometry in GEOMETRIES)


def test_answer_keys_are_documented() -> None:
    text = inspect.getsource(answers) + (ROOT / "mla_tuner" / "overview.py").read_text()
    text += (ROOT / "mla_tuner" / "bench.py").read_text()
    keys = set(re.findall(r'^ {8}"(\w+)": ', text, re.MULTILINE))
    assert len(keys) > 30
    words = set(re.findall(r"\w+", CONFIGURATION))
    assert keys <= words


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def overload(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in decorators)


@pytest.mark.parametrize("path", sorted((ROOT / "mla_tuner").rglob("*.py")), ids=lambda p: p.name)
def test_modules_and_public_names_have_docstrings(path: Path) -> None:
    if path.name == "_build_info.py":
        return
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    bare = [n.name for n in public(tree) if not ast.get_docstring(n) and not overload(n)]
    assert bare == []


def test_exported_names_have_docstrings() -> None:
    for name in mla_tuner.__all__:
        assert inspect.getdoc(getattr(mla_tuner, name)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readme_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == (1, 16, 1, 512)  # type: ignore[attr-defined]
    ran = mla_tuner.last_run()
    assert ran is not None
    assert ran.executed is not None


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        # Commands in backquotes or at the start of a line; "make" is an English word, too.
        named = re.findall(r"(?:`|^ *)make ([a-z-]+)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page.name
