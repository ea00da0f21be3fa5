"""Our kernels without MLX: its texts, compiled as MLX does it, launched as it would launch them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from mla_tuner.cases import SCALE
from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape
from tools.nvrtc import Compiled, Kernel, Nvrtc, find

from .caches import Caches
from .driver import Arguments, Driver, Function, packed
from .recording import Array, Launch, launches_of, stand_ins, texts_from

_LIBRARIES = ("/usr/local/cuda/lib64/libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so.13")
OURS = "ours"


@dataclass(frozen=True)
class Variant:
    """Kernel texts under a name: from another folder, or with other constants."""

    name: str = OURS
    folder: Path | None = None
    defines: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, text: str) -> Variant:
        """Of "NAME=FOLDER" or "NAME=MACRO=VALUE,...", as the command line takes it.

        Raises:
            ValueError: it is neither.
        """
        name, _, rest = text.partition("=")
        if name and name != OURS and rest and Path(rest).is_dir():
            return cls(name, Path(rest))
        pairs = [tuple(each.split("=")) for each in rest.split(",")]
        if not name or name == OURS or any(len(pair) != 2 or not pair[0] for pair in pairs):
            raise ValueError(f"expected NAME=FOLDER or NAME=MACRO=VALUE,...; got {text!r}")
        return cls(name, defines=tuple((key, value) for key, value in pairs))

    def changed(self, kernel: Kernel) -> Kernel:
        """The kernel with this variant's constants: in place of the back end's, or in front."""
        text, shared = kernel.text, kernel.shared_memory
        for key, value in self.defines:
            line = f"#define {key} {value}\n"
            text, count = re.subn(rf"(?m)^#define {re.escape(key)} .*\n", line, text)
            text = text if count else line + text
            shared = int(value) if key == "SHARED" and count else shared
        return kernel._replace(text=text, shared_memory=shared)


@dataclass(frozen=True)
class Planned:
    """What a variant launches for a plan on a shape."""

    variant: Variant
    plan: Plan
    launches: tuple[Launch, ...]

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Text and name of each kernel; no two that differ share both."""
        return [(launch.kernel.text, launch.kernel.name) for launch in self.launches]


def planned(variant: Variant, shape: Shape, plans: Iterable[Plan]) -> list[Planned]:
    """Records plans.

    Raises:
        ValueError: see `launches_of` and `texts_from`.
    """
    given, found = stand_ins(shape), []
    with texts_from(variant.folder):
        for plan in plans:
            launches = launches_of(plan, shape, given, SCALE)
            changed = (replace(each, kernel=variant.changed(each.kernel)) for each in launches)
            found.append(Planned(variant, plan, tuple(changed)))
    return found


@dataclass
class Kernels:
    """Compiles each text once, several at a time, and keeps its function."""

    architecture: str  # e.g. "sm_90a"
    _compiled: dict[tuple[str, str], Compiled | str] = field(default_factory=dict)
    _functions: dict[tuple[str, str], Function] = field(default_factory=dict)

    @cached_property
    def _compiler(self) -> Nvrtc:
        library = find() or next(filter(Path.exists, map(Path, _LIBRARIES)), None)
        if library is None:
            raise ValueError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
        return Nvrtc(library)

    @cached_property
    def _driver(self) -> Driver:
        return Driver()

    def compile(self, work: Iterable[Planned]) -> None:
        """What doesn't compile is told by `failure`. Raises ValueError without a compiler."""
        new = {text for each in work for text in each.texts if text not in self._compiled}
        compiler = self._compiler

        def one(key: tuple[str, str]) -> Compiled | str:
            try:
                return compiler.compile(*key, self.architecture)
            except ValueError as error:
                return str(error)

        with ThreadPoolExecutor() as pool:
            for key, result in zip(new, pool.map(one, new), strict=True):
                self._compiled[key] = result
                if isinstance(result, Compiled):
                    spills = f", {result.spill_bytes} bytes spilled" if result.spill_bytes else ""
                    print(f"{key[1]}: {result.registers} registers{spills}", file=sys.stderr)

    def failure(self, work: Planned) -> str | None:
        """The compiler's words about a kernel of that plan; None where all are compiled."""
        results = (self._compiled[text] for text in work.texts)
        return next((result for result in results if isinstance(result, str)), None)

    def function(self, launch: Launch) -> Function:
        """Loads a kernel that was compiled. Raises ValueError where the driver refuses it."""
        key = launch.kernel.text, launch.kernel.name
        if key not in self._functions:
            result = self._compiled[key]
            assert isinstance(result, Compiled)
            self._functions[key] = self._driver.function(
                result.code, launch.kernel.name, launch.kernel.shared_memory
            )
        return self._functions[key]


class Bound:
    """A plan on a ring of caches, ready to run. All calls share their outputs."""

    def __init__(self, work: Planned, kernels: Kernels, caches: Caches) -> None:
        """Raises ValueError where the driver refuses a kernel."""
        self._torch: Any = import_module("torch")
        self.work, self._caches = work, caches
        self._made = [
            {name: self._empty(shape, dtype) for name, shape, dtype in launch.outputs}
            for launch in work.launches
        ]
        self._functions = [kernels.function(launch) for launch in work.launches]
        self._numbers: dict[tuple[int, str], Any] = {}
        self._arguments = [
            [self._argued(i, k) for i in range(len(work.launches))] for k in range(caches.count)
        ]

    @property
    def merges(self) -> bool:
        return len(self.work.launches) > 1

    def call(self, k: int) -> Any:
        """Puts call `k` on PyTorch's current stream; `[batch, heads, q_len, kv_lora_rank]`."""
        self.part(k, range(len(self.work.launches)))
        shape = self._caches.shape
        (name, _, _), *_ = self.work.launches[-1].outputs
        return self._made[-1][name].view(shape.batch, shape.heads, shape.q_len, -1)

    def decode(self, k: int) -> None:
        """The first launch of call `k` alone."""
        self.part(k, [0])

    def merge(self, k: int) -> None:
        """The others alone."""
        self.part(k, range(1, len(self.work.launches)))

    def part(self, k: int, which: Iterable[int]) -> None:
        stream = self._torch.cuda.current_stream().cuda_stream
        for i in which:
            launch, arguments = self.work.launches[i], self._arguments[k][i]
            self._functions[i].launch(launch.blocks, launch.threads, arguments, stream)

    def spoil(self) -> None:
        """Fills all results with NaN, so that none is taken for an answer of before."""
        for tensor in (tensor for made in self._made for tensor in made.values()):
            tensor.fill_(float("nan"))

    def _empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device="cuda")

    def _argued(self, i: int, k: int) -> Arguments:
        launch = self.work.launches[i]
        values = []
        for parameter in launch.parameters:
            array, name = launch.arrays.get(parameter.name), parameter.name
            if array is None:  # a result
                values.append(packed("pointer", [self._made[i][name].data_ptr()]))
            else:
                values.append(self._value(parameter.kind, i, name, array, k))
        return Arguments(values)

    def _value(self, kind: str, i: int, name: str, array: Array, k: int) -> Any:
        if kind != "pointer":
            return packed(kind, array.strides if kind == "strides" else array.shape)
        return packed(kind, [self._tensor(i, name, array, k).data_ptr()])

    def _tensor(self, i: int, name: str, array: Array, k: int) -> Any:
        if array.origin == "given":
            return self._caches.given(array.key, k)
        if array.origin == "made":
            launch, output = array.result
            return list(self._made[launch].values())[output]
        if (i, name) not in self._numbers:
            self._numbers[i, name] = self._torch.from_numpy(array.contents).cuda()
        return self._numbers[i, name]
