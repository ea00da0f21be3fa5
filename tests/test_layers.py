"""Imports go down only, third parties have one door each, and serving stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mla_tuner

PACKAGE = Path(mla_tuner.__file__).parent

# Highest first; a module imports only from rows below its own.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["share_cli"],
    ["server.cli"],
    ["console", "options"],
    ["html.markdown", "html.output", "html.page"],
    ["html.tables"],
    ["html.compared"],
    ["html.findings"],
    ["html"],
    ["report"],
    ["integrations.run"],
    ["integrations.mlx_lm", "integrations.vllm_metal"],
    ["integrations.shared_attention", "integrations.vllm_routing"],
    ["integrations.routing"],
    ["integrations.absorb"],
    [
        *("integrations.bindings", "integrations.counts", "integrations.mla_classes"),
        *("integrations.spans", "integrations.switch"),
        *("integrations.vllm_op", "integrations.vllm_plan"),
    ],
    ["integrations"],
    ["server.app"],
    ["server.pages"],
    ["server.charts", "server.reading"],
    ["server.archive", "server.client", "server.config"],
    ["server"],
    ["share_contribute", "wrapper_bench_report"],
    ["wrapper_bench_chart"],
    ["answers"],
    ["wrapper_bench"],
    ["fleet"],
    ["tuner", "bench", "share", "verify"],
    ["share_databases"],
    ["share_merge", "share_store"],
    ["share_format"],
    ["wrapper_bench_runner"],
    ["wrapper_bench_module"],
    ["wrapper_bench_widths"],
    ["fleet_study", "models", "overview", "parse", "proposals"],
    ["costs", "live", "recheck"],
    ["measure", "store"],
    ["share_rows"],
    ["conditions", "records", "schema", "share_pool", "worker"],
    ["cases", "evidence"],
    ["ops"],
    ["policy"],
    ["family", "frozen"],
    ["table"],
    ["gates", "fits"],
    ["candidates"],
    ["backends.cpu", "backends.cuda", "backends.metal"],
    ["backends.jit"],
    ["backends.self_check"],
    ["backends.mlx_paths"],
    ["backends.head_start"],
    ["backends.cuda_tiles", "backends.metal_tiles", "backends.native", "backends.shaders"],
    ["backends"],
    ["caches", "device", "plan"],
    ["modes", "shapes"],
    ["errors", "words"],
]
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
# The factory names its products, inside a function.
UPWARDS = {("backends", f"backends.{name}") for name in ("cpu", "cuda", "metal")}
DOORS = {
    "click": {"cli", "console", "options", "server.cli", "share_cli"},
    "datasette": {"server.app", "server.pages"},
    "optuna": {"fleet_study", "proposals"},
    "pydantic": {"models", "share_format", "share_store"},
    "rich": {"report"},
    "sqlalchemy": {"fleet_study"},
    "sqlite_utils": {"store"},
    "uvicorn": {"server.app"},
}
SERVING = LAYERS[LEVEL["ops"] :]
HEAVY = ("numpy", "optuna", "sqlite_utils", "pydantic", "click", "rich", "platformdirs")


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if name not in ("__init__", "_build_info"):
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


MODULES = modules()


def base_of(module: str, node: ast.ImportFrom) -> str:
    """The package-relative module that a `from` import names; "" for the package itself."""
    parts = module.split(".") if module == "backends" else module.split(".")[:-1]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, *(node.module or "").split(".")]).strip(".")


def own_imports(module: str) -> set[str]:
    found = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = base_of(module, node)
            names = {f"{base}.{alias.name}".strip(".") for alias in node.names}
            found |= {name if name in MODULES else base for name in names} - {""}
    return found


def foreign_imports(module: str) -> set[str]:
    found = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module)
    return {name.split(".")[0] for name in found}


def test_every_module_has_a_layer() -> None:
    assert set(MODULES) == set(LEVEL)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module: str) -> None:
    upwards = {name for name in own_imports(module) if LEVEL[name] <= LEVEL[module]}
    assert {(module, name) for name in upwards} <= UPWARDS


def test_own_imports_are_seen() -> None:
    assert {"backends", "caches", "plan", "policy", "shapes"} <= own_imports("ops")
    assert {"backends", "backends.mlx_paths", "device", "caches"} <= own_imports("backends.cpu")


@pytest.mark.parametrize("library", sorted(DOORS))
def test_third_parties_have_one_door(library: str) -> None:
    assert {name for name in MODULES if library in foreign_imports(name)} == DOORS[library]


@pytest.mark.parametrize("module", sorted(name for row in SERVING for name in row))
def test_serving_modules_use_mlx_and_the_standard_library(module: str) -> None:
    allowed = {"mlx", *sys.stdlib_module_names}
    if module == "table":
        allowed.add("platformdirs")  # inside a function: only to find the user's table
    assert foreign_imports(module) <= allowed


@pytest.mark.parametrize("statement", ["import mla_tuner", "import mla_tuner.policy"])
def test_serving_loads_nothing_heavy(statement: str) -> None:
    code = f"{statement}; import sys; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_package_and_its_metadata_agree_on_the_version() -> None:
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'\nversion = "{mla_tuner.__version__}"\n' in project
