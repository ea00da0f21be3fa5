"""What `mx.fast.metal_kernel` makes of a body, as of MLX 0.32.4: the text that Metal compiles.

MLX writes the signature around the body that it is given. A test holds this module to MLX's own
words: it prints them, even without Metal, while a function is exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .translate import BUILTINS

CONSTANT_BELOW = 8  # inputs with fewer elements arrive in the constant address space
TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

Template = Sequence[tuple[str, object]]  # names with a dtype, an int or a bool


@dataclass(frozen=True)
class Argument:
    name: str  # of the input or output
    role: str  # "input", "shape", "strides", "ndim" or "output"


@dataclass(frozen=True)
class KernelText:
    name: str  # what MLX asks the compiled library for
    text: str  # what MLX compiles, behind its own utilities
    arguments: tuple[Argument, ...]  # by buffer index


@dataclass(frozen=True)
class Kernel:
    """What `mx.fast.metal_kernel` is given."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""

    def text(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Template
    ) -> KernelText:
        """The text for these inputs; of them only shapes and dtypes count."""
        values = [_template_value(value) for _, value in template]
        name = self._full_name(inputs, output_dtypes, values)
        arguments, lines = self._parameters(inputs, output_dtypes)
        lines = [f"  {line} [[buffer({index})]]" for index, line in enumerate(lines)]
        used = [attribute for attribute in sorted(BUILTINS) if attribute in self.source]
        lines += [f"  {BUILTINS[attribute]} {attribute} [[{attribute}]]" for attribute in used]
        extra = len(arguments) > len(inputs) + len(output_dtypes)
        if not used and extra and len(output_dtypes) > 1:
            raise ValueError(
                "[msl] MLX closes this signature too early: let the body name an attribute"
            )
        signature = ",\n".join(lines)
        text = f"[[kernel]] void {name}(\n{signature}) {{\n{self.source}\n}}\n"
        if template:
            parameters = ", ".join(f"{_template_kind(value)} {key}" for key, value in template)
            instance = f"{name}<{', '.join(values)}>"
            text = f"template <{parameters}>\n{text}"
            text += (
                f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
            )
        return KernelText(name, self.header + text, tuple(arguments))

    def _full_name(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], values: list[str]
    ) -> str:
        parts = [f"custom_kernel_{self.name}"]
        if values:
            parts.append("_" + "_".join(values).replace("-", "_"))
        parts += [_type(array.dtype) + _passed_as(array) for array in inputs]
        parts += [_type(dtype) for dtype in output_dtypes]
        return "_".join(parts)

    def _parameters(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]
    ) -> tuple[list[Argument], list[str]]:
        arguments, lines = [], []
        for name, array in zip(self.input_names, inputs, strict=True):
            space = "constant" if array.size < CONSTANT_BELOW else "device"
            lines.append(f"const {space} {_type(array.dtype)}{'*' if array.ndim else '&'} {name}")
            arguments.append(Argument(name, "input"))
            # MLX looks for the bare word in the body: in comments and inside longer names, too.
            for role, kind in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
                if array.ndim and f"{name}_{role}" in self.source:
                    lines.append(f"const constant {kind} {name}_{role}")
                    arguments.append(Argument(name, role))
        for name, dtype in zip(self.output_names, output_dtypes, strict=True):
            lines.append(f"device {_type(dtype)}* {name}")
            arguments.append(Argument(name, "output"))
        return arguments, lines


def _type(dtype: mx.Dtype) -> str:
    if dtype not in TYPES:
        raise ValueError(f"[msl] expected a dtype that the emulator has; got {dtype}")
    return TYPES[dtype]


def _passed_as(array: mx.array) -> str:
    return "s" if array.ndim == 0 else "c" if array.size < CONSTANT_BELOW else ""


def _template_kind(value: object) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"


def _template_value(value: object) -> str:
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, mx.Dtype):
        return _type(value)
    raise ValueError(f"[msl] expected a dtype, int or bool for a template; got {value!r}")
