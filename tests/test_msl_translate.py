"""The translator: what it reads from a text, and that it refuses what it does not understand."""

from __future__ import annotations

import pytest

from tools import msl
from tools.msl.translate import BUILTINS, for_emulator, laid_out

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(bool(msl.missing()), reason=msl.missing()),
]

SIGNATURE = "(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]])"
OUT = "device int* out [[buffer(0)]]"
MANY = [(i, f"x{i}") for i in range(65)]


def test_reads_a_template_and_its_instantiation() -> None:
    unit = for_emulator(
        """
        template <typename T, int N>
        [[kernel]] void scale(
            const device T* x [[buffer(0)]],
            device metal::vec<float, 4>* y [[buffer(2)]],
            constant float& factor [[buffer(1)]],
            uint3 at [[thread_position_in_grid]]) {}
        template [[host_name("scale_half")]] [[kernel]] decltype(scale<half, 3>) scale<half, 3>;
        """
    )
    assert unit.name == "scale_half"
    assert [(p.name, p.kind, p.index, p.read_only) for p in unit.parameters] == [
        ("x", "buffer", 0, True),
        ("y", "buffer", 2, False),
        ("factor", "buffer", 1, True),
        ("at", "thread_position_in_grid", 0, False),
    ]
    assert "msl::call(&scale<half, 3>, arguments)" in unit.code


def test_reads_a_plain_kernel() -> None:
    unit = for_emulator(f"int helper() {{ return 1; }} [[kernel]] void plain({OUT}) {{}}")
    assert unit.name == "plain"
    assert list(unit.buffers) == [0]


@pytest.mark.parametrize("name", BUILTINS)
def test_reads_every_attribute_that_mlx_writes(name: str) -> None:
    unit = for_emulator(f"[[kernel]] void f({OUT}, {BUILTINS[name]} x [[{name}]]) {{}}")
    assert unit.parameters[1].kind == name
    assert f"msl::{name.upper()}" in unit.code


def test_threadgroup_variables_become_references() -> None:
    code = for_emulator(
        f"""
        [[kernel]] void f{SIGNATURE} {{
          threadgroup float a[8][2 * 4], b, c[4];
          threadgroup metal::vec<half, 2 * 2> d[3];
          threadgroup unsigned int e;
          threadgroup float* p = &a[0][0];
          const threadgroup float& q = *reinterpret_cast<threadgroup float*>(p);
          for (;;) {{ threadgroup int g[2]; }}
        }}"""
    ).code
    memory = "::msl::threadgroup_array"
    for expected in (
        f'float (&a)[8][2 * 4] = *(float (*)[8][2 * 4]){memory}(0, "a", sizeof(float[8][2 * 4]));',
        f'float &b = *(float *){memory}(1, "b", sizeof(float));',
        "float (&c)[4]",
        "metal::vec<half, 2 * 2> (&d)[3]",
        "unsigned int &e",
        "int (&g)[2]",
    ):
        assert expected in code
    assert "reinterpret_cast< float*>(p)" in code


def test_only_keywords_are_edited_and_lines_stay() -> None:
    source = f"""[[kernel]] void f{SIGNATURE} {{
  int device_count = 1; /* device
  */ float constantly = 2;
  out[0] = device_count + constantly; const char* s = "device [[buffer(1)]]"; (void)s;
}}"""
    code = for_emulator(source).code
    assert 'const char* s = "device [[buffer(1)]]"' in code
    assert "int device_count = 1;" in code
    assert "float constantly = 2;" in code
    assert "out[0]" in code.split('"kernel.metal"\n')[-1].splitlines()[3]


def test_a_shortened_text_is_laid_out_again() -> None:
    by_hand = "for (int k = 0; k < 3; k++) { out[k] = f({k, 2}); }\n"
    assert laid_out(by_hand) == by_hand
    long = 'int a={1};f(";");\n#define A x;y\nfor(int i=0;i<3;){g();if(a){h();}}' + "g();" * 40
    assert laid_out(long).split("\n")[:10] == [
        "int a={1};",
        'f(";");',
        "",
        "#define A x;y",
        "for(int i=0;i<3;){",
        "g();",
        "if(a){",
        "h();",
        "}}",
        "g();",
    ]
    commented = f"// {long}"
    assert laid_out(commented) == commented


REFUSED = {  # by what is wrong: (text, message)
    "no kernel": ("int x;", "expected a .*kernel.*; got none"),
    "two kernels": (f"[[kernel]] void f({OUT}) {{}} [[kernel]] void g({OUT}) {{}}", "one kernel"),
    "a template without instantiation": (
        f"template <typename T> [[kernel]] void f({OUT}) {{}}",
        "one kernel, with one instantiation",
    ),
    "two instantiations": (
        f"template <int N> [[kernel]] void f({OUT}) {{}}"
        + 'template [[host_name("a")]] [[kernel]] decltype(f<1>) f<1>;'
        + 'template [[host_name("b")]] [[kernel]] decltype(f<2>) f<2>;',
        "one kernel, with one instantiation",
    ),
    "an instantiation of another function": (
        f"template <int N> [[kernel]] void f({OUT}) {{}}"
        + 'template [[host_name("a")]] [[kernel]] decltype(g<1>) g<1>;',
        "an instantiation of `f`",
    ),
    "an instantiation without a name": (
        f"template <int N> [[kernel]] void f({OUT}) {{}}"
        + "template [[kernel]] decltype(f<1>) f<1>;",
        "instantiation not understood",
    ),
    "a kernel that returns something": ("[[kernel]] int f() {}", "kernel not understood"),
    "a declaration": (f"[[kernel]] void f({OUT});", "no body"),
    "an unknown attribute": (f"[[kernel]] void f({OUT}) {{ [[unroll]] for (;;) {{}} }}", "unroll"),
    "a limit of threads": (
        f"[[kernel, max_total_threads_per_threadgroup(64)]] void f({OUT}) {{}}",
        "attribute not understood",
    ),
    "a function constant": (
        f"constant bool b [[function_constant(0)]]; [[kernel]] void f({OUT}) {{}}",
        "attribute not understood",
    ),
    "threadgroup memory of the host": (
        f"[[kernel]] void f({OUT}, threadgroup int* x [[threadgroup(0)]]) {{}}",
        "attribute not understood",
    ),
    "a parameter without attribute": ("[[kernel]] void f(device float* x) {}", "device float. x"),
    "a buffer without address space": ("[[kernel]] void f(float* x [[buffer(0)]]) {}", "parameter"),
    "a buffer by value": ("[[kernel]] void f(constant float x [[buffer(0)]]) {}", "parameter"),
    "a buffer in threadgroup memory": (
        "[[kernel]] void f(threadgroup int* x [[buffer(0)]]) {}",
        "parameter not understood",
    ),
    "a buffer that has no plain number": (
        "[[kernel]] void f(device float* x [[buffer(N)]]) {}",
        "attribute not understood",
    ),
    "a position in device memory": (
        f"[[kernel]] void f({OUT}, device uint* i [[thread_position_in_grid]]) {{}}",
        "parameter not understood",
    ),
    "one buffer twice": (
        f"[[kernel]] void f({OUT}, device int* b [[buffer(0)]]) {{}}",
        r"buffers 0, 1, .* got \[0, 0\]",
    ),
    "a hole in the buffers": ("[[kernel]] void f(device int* x [[buffer(1)]]) {}", r"got \[1\]"),
    "too many buffers": (
        f"[[kernel]] void f({', '.join(f'device int* {n} [[buffer({i})]]' for i, n in MANY)}) {{}}",
        "up to 30",
    ),
    "an initialised threadgroup variable": (
        f"[[kernel]] void f{SIGNATURE} {{ threadgroup float x = 1; }}",
        "threadgroup variable not understood",
    ),
    "a constant threadgroup variable": (
        f"[[kernel]] void f{SIGNATURE} {{ const threadgroup float x[2]; }}",
        "threadgroup variable not understood",
    ),
    "a threadgroup variable without type": (
        f"[[kernel]] void f{SIGNATURE} {{ threadgroup x; }}",
        "threadgroup variable not understood",
    ),
    "a threadgroup variable outside the kernel": (
        f"void g() {{ threadgroup float x[2]; }} [[kernel]] void f{SIGNATURE} {{}}",
        "threadgroup variable not understood",
    ),
    "a threadgroup member": (
        f"struct S {{ threadgroup float x; }}; [[kernel]] void f{SIGNATURE} {{}}",
        "threadgroup variable not understood",
    ),
    "too many threadgroup variables": (
        f"[[kernel]] void f{SIGNATURE} {{ threadgroup int {', '.join(n for _, n in MANY)}; }}",
        "more than 64 threadgroup variables",
    ),
    "an open bracket": (f"[[kernel]] void f{SIGNATURE} {{", "never closed"),
    "another kind of function": (f"vertex float4 f{SIGNATURE} {{}}", "`vertex` is not supported"),
    "a double": (f"[[kernel]] void f{SIGNATURE} {{ double x = 1; }}", "`double` is not supported"),
    "a goto": (f"[[kernel]] void f{SIGNATURE} {{ goto x; }}", "`goto` is not supported"),
    "a lambda": (
        f"[[kernel]] void f{SIGNATURE} {{ auto g = [](int x) {{ return x; }}; }}",
        "a lambda is not Metal",
    ),
    "a returned lambda": (
        f"auto g() {{ return [] {{}}; }} [[kernel]] void f{SIGNATURE} {{}}",
        "a lambda is not Metal",
    ),
    "a system header": (f"#include <vector>\n[[kernel]] void f({OUT}) {{}}", "vector"),
    "a broken macro": (f"#if\n[[kernel]] void f({OUT}) {{}}", "#if with no expression"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str) -> None:
    text, message = REFUSED[what]
    with pytest.raises(msl.SourceError, match=message):
        for_emulator(text)
