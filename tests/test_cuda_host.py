"""The host-cost tool without a GPU: what it compares."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mla_tuner.plan import Plan
from mla_tuner.shapes import Shape
from tools import cuda_host
from tools.cuda_check import Ring
from tools.nvrtc import Nvrtc, find, recorded

SHAPE, PLAN = Shape(512, 1, 16), Plan("split", 2, "r16")


@pytest.mark.skipif(find() is None, reason="NVRTC is not installed (nvidia-cuda-nvrtc)")
def test_the_plain_form_is_the_same_kernels_with_whole_texts() -> None:
    library = find()
    assert library is not None
    with recorded() as kernels:
        cases = Ring.of(SHAPE, 1 << 16).cases[:2]
        step = cuda_host.plain(PLAN, SHAPE, cases)
        assert step(cases[1], cases[0].q_nope).shape == (1, 16, 1, 512)
    assert [kernel.name.split("_")[3] for kernel in kernels] == ["small", "merge"]
    for kernel in kernels:
        assert "#include" not in kernel.text
        assert "//" not in kernel.text
        assert Nvrtc(library).compile(kernel.text, kernel.name, "sm_90a").registers


def test_a_ratio_is_of_one_round() -> None:
    cases = Ring.of(SHAPE, 1 << 16).cases[:1]
    forms = {name: lambda case, q: q + 1 for name in ("ours", "plain")}
    found = cuda_host.measured(forms, cases, 3)
    assert set(found) == {"ours", "plain", "ours / plain"}
    assert found["ours"]["host"] == pytest.approx(found["ours"]["build"] + found["ours"]["encode"])


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mx.cuda.is_available():
        pytest.skip("a GPU is here")
    monkeypatch.setattr("sys.argv", ["cuda_host"])
    assert cuda_host.main() == 1
    assert "the CUDA kernels can't run" in capsys.readouterr().out
