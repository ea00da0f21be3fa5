"""vllm-metal's own MLA tests, unmodified: `python -m tools.upstream_tests --checkout DIR`.

The tests' operation is `vllm_op.metal_mla_paged_attention` with a fixed plan, and their wrapper is
routed as `vllm_metal.install` does it. Off Apple vllm-metal's own extension does not load; one test
asks for nothing but that it does, and gets an empty one. Exits with 1 where a test did not pass,
or where no kernel of ours ran.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mla_tuner import last_run
from mla_tuner.integrations import vllm_metal
from mla_tuner.integrations.vllm_op import metal_mla_paged_attention
from mla_tuner.plan import Plan

FILES = ("test_mla_kernel.py", "test_mla_paged_backend.py", "test_mla_materialized_prefill.py")


class ThroughOurs:
    """Runs the operation by `plan`, and counts what was executed and how the tests went."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.executed: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def operation(self, *arguments: Any, **named: Any) -> mx.array:
        """Evaluated at once, so that what was executed can be told."""
        out = metal_mla_paged_attention(*arguments, **named, plan=self.plan)
        mx.eval(out)
        run = last_run()
        self.executed[str(run and run.executed)] += 1
        return out

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts once: what its call gave, or that it did not come to that."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1

    @property
    def native(self) -> int:
        """Calls that one of our kernels answered."""
        return sum(n for plan, n in self.executed.items() if plan.startswith(("single", "split")))


def run(checkout: Path, plan: Plan) -> ThroughOurs:
    """Run the tests in this process.

    Raises:
        SystemExit: there is no vllm-metal, or of a source that we don't know.
    """
    tests = [str(checkout / "tests" / name) for name in FILES]
    missing = [name for name in tests if not Path(name).is_file()]
    if missing:
        raise SystemExit(f"Error: no checkout of vllm-metal: {missing[0]} is missing")
    sys.path.insert(0, str(checkout))
    ours = ThroughOurs(plan)
    for name, why in vllm_metal.install().classes.items():
        if why != vllm_metal.ROUTED:
            raise SystemExit(f"Error: vllm-metal's {name} is not routed: {why}")
    metal: Any = import_module("vllm_metal.metal")
    metal.metal_mla_paged_attention = ours.operation
    if platform.system() != "Darwin":
        metal._ops_module = ModuleType("_paged_ops")
    options = ["--noconftest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    pytest.main([*options, "--rootdir", str(checkout), *tests], plugins=[ours])
    return ours


def partitions(text: str) -> Plan:
    """The plan with that many partitions."""
    return Plan("single") if text == "1" else Plan("split", int(text))


def main() -> int:
    """Print pytest's own report, then one line of what ran."""
    parser = argparse.ArgumentParser(prog="python -m tools.upstream_tests", description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True, help="where vllm-metal is")
    parser.add_argument("--partitions", type=partitions, default="4", help="1 runs `single`")
    options = parser.parse_args()
    ours = run(options.checkout.resolve(), options.partitions)
    passed, total = ours.outcomes["passed"], ours.outcomes.total()
    executed = ", ".join(f"{n} by {plan}" for plan, n in ours.executed.most_common())
    print(f"{passed} of {total} tests pass; the operation answered {executed or 'nothing'}")
    return 0 if passed == total and ours.native else 1


if __name__ == "__main__":
    sys.exit(main())
