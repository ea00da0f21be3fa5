"""The documentation names everything that users can reach, and its example runs."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import mla_tuner
from mla_tuner import answers, cli, gates
from mla_tuner.plan import PATHS
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
        if isinstance(param, click.Argument):  # it stands in the line of usage
            continue
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
    named = r'"(MLA_TUNER(?:_[A-Z]+)*|(?:MLX|DATASETTE|VLLM|XDG)(?:_[A-Z]+)+)"'
    used = {name for _, text in sources() for name in re.findall(named, text)}
    assert used >= {"MLA_TUNER", "MLA_TUNER_DB", "MLA_TUNER_THREADS", "MLX_MAX_OPS_PER_BUFFER"}
    assert all(f"`{name}`" in CONFIGURATION for name in used)


def test_geometries_are_documented() -> None:
    assert all(f"`{geometry}`" in CONFIGURATION for geometry in GEOMETRIES)


# Reasons that are none against a plan.
AGREEMENTS = {
    "... can run here",
    "the CPU kernel agrees with mlx_rows",
    "the ... kernels agree with mlx_rows",
}


def words(node: ast.expr, names: dict[str, str]) -> Iterator[str]:
    """Texts that a value can be, `...` for what is filled in; names: the module's constants."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values)
        yield "".join(parts).replace("......", "...")
    elif isinstance(node, ast.Name) and node.id in names:
        yield names[node.id]
    elif isinstance(node, ast.IfExp):
        yield from (*words(node.body, names), *words(node.orelse, names))
    elif isinstance(node, ast.BoolOp | ast.Tuple):
        for each in node.values if isinstance(node, ast.BoolOp) else node.elts:
            yield from words(each, names)


def reasons(module: str) -> set[str]:
    """Texts that a module returns, calls a reason or counts calls by."""
    tree = ast.parse((ROOT / "mla_tuner" / f"{module}.py").read_text())
    names = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        named = [ast.unparse(target) for target in getattr(node, "targets", [])]
        value: ast.expr | None = None
        if isinstance(node, ast.Return) or "reason" in named:
            value = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("count_stock"):
            value = node.args[0]
        if value is not None:
            found.update(words(value, names))
    return found


def test_paths_and_gates_are_documented() -> None:
    assert all(f"| `{path}` |" in CONFIGURATION for path in PATHS)
    names = re.findall(r'^ {8}\("(\w+)", lambda', inspect.getsource(gates.checks), re.MULTILINE)
    assert len(names) == 10
    for name in names:
        assert f"| `{name}` |" in CONFIGURATION, name


BACKENDS = ("cpu", "cuda", "cuda_tiles", "jit", "metal", "metal_tiles", "mlx_paths", "native")


@pytest.mark.parametrize("module", [*BACKENDS, "self_check"])
def test_refusals_are_documented(module: str) -> None:
    found = {text for text in reasons(f"backends/{module}") if text.count(" ") > 1}
    found = {text for text in found if "\n" not in text} - AGREEMENTS
    assert found
    for text in found:
        assert f"`{text}`" in CONFIGURATION, text


@pytest.mark.parametrize("module", ["routing", "shared_attention", "spans", "vllm_routing"])
def test_reasons_for_an_engines_own_code_are_documented(module: str) -> None:
    pages = " ".join(
        (ROOT / "docs" / f"{name}.md").read_text() for name in ("mlx-lm", "vllm-metal")
    )
    found = {text for text in reasons(f"integrations/{module}") if text}
    assert len(found) > 2
    for text in found:
        assert f"`{text}`" in pages, text


def test_answer_keys_are_documented() -> None:
    text = inspect.getsource(answers) + (ROOT / "mla_tuner" / "overview.py").read_text()
    for name in ("bench", "wrapper_bench"):
        text += (ROOT / "mla_tuner" / f"{name}.py").read_text()
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


def test_what_messages_say_to_install_is_an_extra() -> None:
    extras = (ROOT / "pyproject.toml").read_text().split("optional-dependencies]")[1]
    known = set(re.findall(r"^([a-z0-9-]+) = \[", extras, re.MULTILINE))
    code = "".join(path.read_text() for path in (ROOT / "mla_tuner").rglob("*.py"))
    said = re.findall(r"pip install (?:'mla-tuner\[([a-z0-9-]+)\]')?", code)
    assert {"chart", "fleet", "mlx-lm", "server"} <= set(said) <= known


@pytest.mark.skipif(not shutil.which("make"), reason="make is not here")
def test_make_help_has_a_line_for_every_target() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = ["make", "--no-print-directory", "help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [
        re.fullmatch(r"make ([a-z-]+) +(\S.{5,110})", each) for each in said.stdout.splitlines()
    ]
    assert [line and line[1] for line in lines] == targets
