"""The examples run on the CPU and compute attention; dry runs on the fake GPU show that CUDA has kernels for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_flash.spec.arch import ARCHS
from cute_flash.tools.warmup import recorded_keys
from tests.examples import checks
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.gpu import FakeGpu, fake_gpu

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on the CPU, also on a machine with a GPU."""
    for module in checks.MODULES.values():
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "DTYPE", torch.float32)


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A fake GPU: CPU tensors of the examples claim to be on CUDA, in bf16."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # In fp32: 16-bit products take a hundred times as long on some CPUs.
        return (x.float() @ weight.float().mT + (0 if bias is None else bias.float())).to(weight.dtype)

    monkeypatch.setattr(F, "linear", linear)
    for module in checks.MODULES.values():
        monkeypatch.setattr(module, "DTYPE", torch.bfloat16)
    with fake_gpu(request.param) as gpu, claiming_cuda(), launching_operators():
        yield gpu


def shape_of(line: str) -> str:
    """A line of output without its numbers."""
    return re.sub(r"\d+(,\d{3})*(\.\d+)?(e[+-]\d+)?", "#", line)


def printed_in_docs(name: str) -> list[str]:
    section = PAGE.partition(f"python examples/{name}.py")[2].partition("## ")[0]
    return section.partition("```text\n")[2].partition("```")[0].splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", checks.CHECKS)
def test_results_on_the_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    checks.CHECKS[name](1e-4)
    documented = printed_in_docs(name)
    assert documented
    assert {shape_of(line) for line in documented} <= {shape_of(line) for line in capsys.readouterr().out.splitlines()}


@pytest.mark.slow
# The fake GPU has no kernels of `attn_decode`.
@pytest.mark.parametrize("name", [name for name in checks.CHECKS if name not in ("train_gpt", "generate", "mla")])
def test_cuda_has_the_kernels(name: str, gpu: FakeGpu) -> None:
    checks.CHECKS[name](2e-2)
    assert f"fwd_{gpu.family}" in gpu.kernels


def test_cuda_has_the_kernels_of_the_gpt(gpu: FakeGpu) -> None:
    checks.train_gpt.main(steps=2, batch=2, seqlen=8, width=16)
    assert gpu.kernels.count(f"fwd_{gpu.family}") == gpu.kernels.count(f"bwd_{gpu.family}") == 4


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_cuda_has_the_kernels_of_latent_attention(family: str) -> None:
    @torch.no_grad()
    def step() -> None:
        model, text = checks.mla.Model(), torch.zeros(3, 9, dtype=torch.int64)
        caches = torch.empty(checks.mla.LAYERS, 3, 64, 1, checks.mla.LATENT + checks.mla.TURNED, dtype=torch.bfloat16)
        model(model(text, caches, 0), caches, 9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks.mla, "DTYPE", torch.bfloat16)
        keys = recorded_keys(step, ARCHS[f"sm_{family[2:]}"])
    assert [key.kernel for key in keys] == [f"fwd_{family}", "decode_latent"]


@pytest.mark.slow
def test_tokens_of_latent_attention_survive_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = checks.mla.main()
    monkeypatch.setattr(checks.mla, "DTYPE", torch.bfloat16)
    assert torch.equal(checks.mla.main(), expected)


@pytest.mark.processes
def test_a_script_runs_as_typed() -> None:
    argv = [sys.executable, "examples/train_gpt.py", "--steps", "50"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert shape_of(done.stdout.strip()) == "step #: loss #, # tokens/s"


def test_examples_are_short_and_documented() -> None:
    found = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    # test_notebook.py and test_context_parallel.py run the others.
    notebooks = {"getting_started.ipynb", "draw_masks.ipynb", "ladder.ipynb"}
    assert found == {f"{name}.py" for name in checks.MODULES} | notebooks | {"context_parallel.py"}
    for name in found:
        assert f"examples/{name}" in PAGE
        if name.endswith(".py"):
            assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) <= 80
