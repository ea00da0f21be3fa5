"""Turns the Metal text of one kernel into C++ that runs on the CPU, or that clang can type-check.

The edits are mechanical: attributes and address spaces go, threadgroup variables become references
into threadgroup memory, an entry point is added. All else is the given text, on the given lines.
What is not understood is refused, never guessed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .tokens import SourceError, Tokens

CPP = Path(__file__).resolve().parent / "cpp"
FILE = "kernel.metal"  # what messages call the text
LONG = 150  # characters of a line that nobody wrote by hand

ADDRESS_SPACES = ("device", "constant", "threadgroup", "thread")
# Other kinds of functions and memory, and C++ that Metal does not have.
REFUSED = {
    *("vertex", "fragment", "threadgroup_imageblock", "ray_data", "object_data"),
    *("double", "goto", "new", "delete", "try", "catch", "throw", "noexcept", "virtual"),
    *("dynamic_cast", "typeid", "thread_local", "register", "asm"),
}
BUILTINS = {  # attribute: its type in the signature that MLX writes
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
ATTRIBUTE = re.compile(
    rf'kernel|maybe_unused|host_name\("\w+"\)|buffer\(\d+\)|{"|".join(BUILTINS)}'
)
MAX_BUFFERS, MAX_VARIABLES = 31, 64
METAL_INCLUDE = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*<metal_(?:stdlib|math|simdgroup|simdgroup_matrix|common|compute)>",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: str  # "buffer" or a member of BUILTINS
    index: int = 0
    read_only: bool = False


@dataclass(frozen=True)
class Translation:
    name: str  # of the kernel, as the host asks for it
    text: str  # what reports go by
    code: str
    parameters: tuple[Parameter, ...]

    @property
    def buffers(self) -> dict[int, Parameter]:
        return {p.index: p for p in self.parameters if p.kind == "buffer"}


class Definition(NamedTuple):
    function: str
    template: bool
    parameters: tuple[Parameter, ...]
    body: tuple[int, int]


def laid_out(text: str) -> str:
    """One statement a line, where a shortened text has many: reports go by lines."""
    lines = text.splitlines()
    if max(map(len, lines), default=0) <= LONG or "//" in text or "/*" in text:
        return text
    tokens, depth = Tokens(text), 0
    for at, token in enumerate(tokens.code):
        depth += (token.text == "(") - (token.text == ")")
        opens = token.text == "{" and tokens.text(at - 1) in (")", "else", "{", "}", ";")
        closes = token.text == "}" and tokens.text(at + 1) not in (";", ",", "}")
        if depth == 0 and (token.text == ";" or opens or closes):
            tokens.replace(at, at + 1, f"{token.text}\n")
    return tokens.edited()


def complete(text: str) -> str:
    """The text behind what stands in for the utilities that MLX puts in front of it."""
    return f'{(CPP / "mlx_names.metal").read_text()}\n#line 1 "{FILE}"\n{text}'


def preprocess(source: str) -> str:
    """`source` without its macros; SourceError for what the preprocessor does not take."""
    if not shutil.which("g++"):
        raise FileNotFoundError("[msl] expected g++ (12 or later) on the path; got none")
    # No system headers: a kernel that includes one fails here, as it would on a Mac.
    command = ["g++", "-E", "-x", "c++", "-nostdinc", "-D__METAL__=1", "-D__METAL_VERSION__=320"]
    done = subprocess.run(
        [*command, "-"], input=METAL_INCLUDE.sub("", source), capture_output=True, text=True
    )
    if done.returncode:
        raise SourceError(done.stderr)
    return done.stdout


@cache
def for_emulator(text: str) -> Translation:
    """What runs on the CPU. `text`: what MLX compiles, without its own utilities."""
    text = laid_out(text)
    unit = Unit(preprocess(complete(text)))
    unit.drop_attributes()
    unit.drop_words(*ADDRESS_SPACES)
    unit.threadgroup_variables_become_references()
    body = f"namespace msl_user {{\n{unit.tokens.edited()}\n}}  // namespace msl_user\n"
    code = f'#include "library.h"\n{body}{unit.entry_point()}'
    return Translation(unit.name, text, code, unit.kernel.parameters)


def for_type_check(text: str) -> str:
    """What clang checks against declarations.h, with address spaces."""
    unit = Unit(preprocess(complete(laid_out(text))))
    unit.drop_attributes()
    unit.threadgroup_variables_become_static()
    unit.pointer_casts_become_checked()
    return '#include "declarations.h"\n' + unit.tokens.edited()


class Unit:
    """One preprocessed source with its one kernel, read and then edited."""

    def __init__(self, preprocessed: str) -> None:
        self.tokens = Tokens(preprocessed)
        self.attributes = self._find_attributes()  # start: end
        self._inside = {at for start, end in self.attributes.items() for at in range(start, end)}
        self._refuse_what_metal_lacks()
        self.kernel, self.name, self.arguments = self._find_kernel()

    # --- reading ----------------------------------------------------------------------------------

    def _refuse_what_metal_lacks(self) -> None:
        t = self.tokens
        for at, token in enumerate(t.code):
            if token.kind == "name" and token.text in REFUSED:
                raise SourceError(f"`{token.text}` is not supported: {t.around(at)}")
            if token.text == "[" and at not in self._inside:
                before = t.text(at - 1)
                if before == "return" or not (t.is_name(at - 1) or before in (")", "]")):
                    raise SourceError(f"a lambda is not Metal: {t.around(at)}")

    def _find_attributes(self) -> dict[int, int]:
        t, found, at = self.tokens, {}, 0
        while at < len(t.code):
            if t.text(at) == "[" and t.text(at + 1) == "[":
                end = t.match(at) + 1
                for part in t.split(at + 2, end - 2):
                    if not ATTRIBUTE.fullmatch(t.source(*part)):
                        raise SourceError(f"attribute not understood: {t.source(at, end)}")
                found[at] = end
                at = end
            else:
                at += 1
        return found

    def _texts(self, start: int) -> list[str]:
        """["buffer(0)"] for the attribute list at `start`."""
        t, end = self.tokens, self.attributes[start]
        return [t.source(*part) for part in t.split(start + 2, end - 2)]

    def _attributes_before(self, at: int) -> tuple[list[str], int]:
        """All attributes directly in front of `at`, and where the first begins."""
        ends = {end: start for start, end in self.attributes.items()}
        texts: list[str] = []
        while at in ends:
            at = ends[at]
            texts = self._texts(at) + texts
        return texts, at

    def _find_kernel(self) -> tuple[Definition, str, str]:
        """The definition, the name that the host asks for, and the template arguments "<...>"."""
        marks = [start for start in self.attributes if "kernel" in self._texts(start)]
        if not marks:
            raise SourceError("expected a [[kernel]]; got none")
        definition = self._definition(marks[0])
        if not definition.template and len(marks) == 1:
            return definition, definition.function, ""
        if definition.template and len(marks) == 2:
            return definition, *self._instantiation(marks[1], definition.function)
        raise SourceError(
            "expected one kernel, with one instantiation where it is a template; "
            f"got {len(marks)} marks of [[kernel]]"
        )

    def _definition(self, mark: int) -> Definition:
        t, at = self.tokens, self.attributes[mark]
        if t.text(at) != "void" or not t.is_name(at + 1) or t.text(at + 2) != "(":
            raise SourceError(f"kernel not understood: {t.around(at)}")
        function, close = t.text(at + 1), t.match(at + 2)
        if t.text(close + 1) != "{":
            raise SourceError(f"kernel `{function}` has no body: {t.around(close)}")
        parameters = self._parameters(at + 3, close, function)
        template = self._template_ends_at(mark)
        return Definition(function, template, parameters, (close + 1, t.match(close + 1)))

    def _template_ends_at(self, end: int) -> bool:
        """Is there a `template <...>` directly in front of `end`?"""
        t, at = self.tokens, end - 1
        if t.text(at) != ">":
            return False
        while at > 0 and t.text(at) not in ("template", ";", "}"):
            at -= 1
        return t.text(at) == "template" and t.match(at + 1) == end - 1

    def _instantiation(self, mark: int, function: str) -> tuple[str, str]:
        """Reads `template [[host_name("x")]] [[kernel]] decltype(f<...>) f<...>;`."""
        t, at = self.tokens, self.attributes[mark]
        texts, before = self._attributes_before(mark)
        names = [text for text in texts if text.startswith("host_name")]
        if t.text(before - 1) != "template" or len(names) != 1 or t.text(at) != "decltype":
            raise SourceError(f"instantiation not understood: {t.around(mark)}")
        named = t.match(at + 1) + 1
        if t.text(named) != function or t.text(named + 1) != "<":
            raise SourceError(f"expected an instantiation of `{function}`: {t.around(named)}")
        return names[0].split('"')[1], t.source(named + 1, t.match(named + 1) + 1)

    def _parameters(self, start: int, end: int, function: str) -> tuple[Parameter, ...]:
        found = [self._parameter(*part) for part in self.tokens.split(start, end)]
        indices = sorted(p.index for p in found if p.kind == "buffer")
        if indices != list(range(len(indices))) or len(indices) > MAX_BUFFERS:
            raise SourceError(
                f"expected kernel `{function}` to have buffers 0, 1, ... up to {MAX_BUFFERS - 1}; "
                f"got {indices}"
            )
        return tuple(found)

    def _parameter(self, start: int, end: int) -> Parameter:
        t = self.tokens
        texts, declarator = self._attributes_before(end)
        words = [t.text(at) for at in range(start, declarator)]
        pointer = next((i for i, word in enumerate(words) if word in ("*", "&")), len(words))
        space = [word for word in words if word in ADDRESS_SPACES]
        read_only = "const" in words[:pointer] or space == ["constant"]
        if len(texts) == 1 and words:
            if texts[0] in BUILTINS and not space:
                return Parameter(words[-1], texts[0])
            passed = space in (["device"], ["constant"]) and pointer < len(words)
            if texts[0].startswith("buffer") and passed:
                return Parameter(words[-1], "buffer", int(texts[0][len("buffer(") : -1]), read_only)
        raise SourceError(f"kernel parameter not understood: {t.source(start, end)}")

    # --- editing ----------------------------------------------------------------------------------

    def _threadgroup_variables(self) -> list[tuple[int, int]]:
        """The statements [start, end) that declare variables in threadgroup memory."""
        t, found = self.tokens, []
        first, last = self.kernel.body
        for at, token in enumerate(t.code):
            if token.text != "threadgroup" or token.kind != "name" or self._is_pointer(at + 1):
                continue
            end = at
            while t.text(end) not in (";", "=", "{", ""):
                end += 1
            starts = t.text(at - 1) in (";", "{", "}")
            if not (first < at < last) or not starts or t.text(end) != ";":
                raise SourceError(f"threadgroup variable not understood: {t.source(at, end + 1)}")
            found.append((at, end + 1))
        return found

    def _is_pointer(self, at: int) -> bool:
        """Does a * or & follow the type that begins here?"""
        t, depth = self.tokens, 0
        while at < len(t.code) and depth >= 0:
            text = t.text(at)
            if depth == 0 and text in ("*", "&"):
                return True
            if depth == 0 and text in "();=,[{":
                return text == "(" and t.text(at + 1) in ("*", "&")
            depth += (text == "<") - (text == ">")
            at += 1
        return False

    def threadgroup_variables_become_references(self) -> None:
        t, count = self.tokens, 0
        for start, end in self._threadgroup_variables():
            first, *others = t.split(start + 1, end - 1)
            name_at = self._declared_name(*first)
            kind = t.source(start + 1, name_at)
            references = []
            for begin, stop in [(name_at, first[1]), *others]:
                name, size = t.text(begin), t.source(begin + 1, stop)
                if not kind or not t.is_name(begin) or not (size == "" or size.startswith("[")):
                    raise SourceError(
                        f"threadgroup variable not understood: {t.source(start, end)}"
                    )
                if count == MAX_VARIABLES:
                    raise SourceError(f"more than {MAX_VARIABLES} threadgroup variables")
                variable, pointer = (
                    (f"(&{name}){size}", f"(*){size}") if size else (f"&{name}", "*")
                )
                memory = f'::msl::threadgroup_array({count}, "{name}", sizeof({kind}{size}))'
                references.append(f"{kind} {variable} = *({kind} {pointer}){memory};")
                count += 1
            t.replace(start, end, " ".join(references))

    def _declared_name(self, start: int, end: int) -> int:
        """Where `float x[8][N]` names x: the last name outside brackets."""
        t, at, last = self.tokens, start, start
        while at < end:
            if t.text(at) in ("[", "<"):
                at = t.match(at)
            elif t.is_name(at):
                last = at
            at += 1
        return last

    def threadgroup_variables_become_static(self) -> None:
        for start, _ in self._threadgroup_variables():
            self.tokens.replace(start, start + 1, "static threadgroup")

    def pointer_casts_become_checked(self) -> None:
        """`(device T*)(x)` keeps its address space; clang alone lets a C-style cast change it."""
        t = self.tokens
        for at, token in enumerate(t.code):
            if token.text != "(" or (t.is_name(at - 1) and t.text(at - 1) != "return"):
                continue
            close = t.match(at)
            words = [t.text(i) for i in range(at + 1, close)]
            is_type = len(words) > 1 and words[-1] == "*" and "(" not in words
            if is_type and t.text(close + 1) == "(":
                t.replace(at, at + 1, "::msl_cast<")
                t.replace(close, close + 1, ">")

    def drop_attributes(self) -> None:
        for start, end in self.attributes.items():
            self.tokens.blank(start, end)

    def drop_words(self, *words: str) -> None:
        for at, token in enumerate(self.tokens.code):
            if token.kind == "name" and token.text in words:
                self.tokens.blank(at, at + 1)

    def entry_point(self) -> str:
        """The table that runtime.cpp launches."""
        parameters = self.kernel.parameters
        table = ", ".join(f'{{msl::{p.kind.upper()}, {p.index}, "{p.name}"}}' for p in parameters)
        call = f"msl::call(&{self.kernel.function}{self.arguments}, arguments);"
        return f"""#line 1 "entry point"
static const msl::Argument arguments[] = {{{table}}};
static void entry() {{ using namespace msl_user; using namespace metal; {call} }}
extern const msl::Kernel msl_kernel = {{entry, arguments, {len(parameters)}}};
"""
