"""Command-line values: what is read, and what is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_tuner.parse import DTYPE_NAMES, count, duration, program, several, word


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("4096", 4096), ("4k", 4096), ("1M", 1 << 20), (" 32K ", 32768)],
)
def test_count(text: str, expected: int) -> None:
    assert count(1, 1 << 31)(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "4kb", "k", "1e3", "4 k", "9" * 40, "٣"])
def test_bad_count(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected 1\.\.4096, such as 4096 or 4k; got "):
        count(1, 4096)(text)


def test_small_counts_name_no_thousands() -> None:
    with pytest.raises(ValueError, match=r"^expected 1\.\.8; got '9'$"):
        count(1, 8)("9")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("5m", 300), ("1h", 3600), ("0.5m", 30), ("7", 7), ("2H", 7200)],
)
def test_duration(text: str, expected: float) -> None:
    assert duration(text) == expected


@pytest.mark.parametrize("text", ["", "0s", "0", "-5m", "5 m", "5d", "inf", "nan", "1m30s"])
def test_bad_duration(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time such as 90s, 5m or 1h; got "):
        duration(text)


def test_word_knows_other_spellings() -> None:
    dtype = word(DTYPE_NAMES)
    assert [dtype(text) for text in ("bf16", "FP16", "float32")] == [
        "bfloat16",
        "float16",
        "float32",
    ]
    with pytest.raises(ValueError, match=r"expected one of bfloat16, .*; got 'int8'"):
        dtype("int8")


def test_several() -> None:
    assert several(count(1, 9))("3,1,3") == (3, 1)
    assert several(count(1, 9), repeats=True)("3,1,3") == (3, 1, 3)
    with pytest.raises(ValueError, match="got ''"):
        several(count(1, 9))("1,,2")


def test_the_program_is_named_as_the_shell_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program(".venv/bin/mla-tune") == ".venv/bin/mla-tune"
    assert program("mla-tune") == program("/usr/bin/pytest") == "mla-tune"
    (tmp_path / "mla-tune").touch(mode=0o755)
    assert program(".venv/bin/mla-tune") == "mla-tune"
