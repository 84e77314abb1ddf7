"""An installed pack on a GPU: a training step compiles nothing, and its bits are those of compiled kernels.

The tests need a wheel of `cute-flash pack`: python -m pytest tests/gpu/test_pack.py --pack=WHEEL
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

# A GPT of two layers: dropout, full sequences and a packed batch; forward and backward. Prints a checksum of each
# result, and whether the compiler was imported.
STEPS = """
import hashlib, json, sys
import torch, cute_flash
from cute_flash.jit import kernels
from torch import nn

torch.manual_seed(0)
HEADS, WIDTH, SEQLEN = 4, 256, 320
offsets = torch.tensor([0, 100, 131, SEQLEN * 2], dtype=torch.int32, device="cuda")


def bits(x):
    return hashlib.sha256(x.detach().view(torch.int16).cpu().numpy().tobytes()).hexdigest()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, **keywords):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        if "varlen" in keywords:
            q, k, v = (y.flatten(0, 1) for y in (q, k, v))
            out = cute_flash.attn_varlen(q, k, v, offsets, offsets, causal=True)
            out = out.unflatten(0, x.shape[:2])
        else:
            out = cute_flash.attn(q, k, v, causal=True, layout="bshd", **keywords)
        return x + self.proj(out.flatten(-2))


model = nn.ModuleList([Block(), Block()]).cuda().bfloat16()
x = torch.randn(2, SEQLEN, WIDTH, device="cuda").bfloat16()
sums = {}
calls = {"plain": {}, "deterministic": {"deterministic": True}, "dropout": {"dropout": 0.1}, "varlen": {"varlen": True}}
for name, keywords in calls.items():
    model.zero_grad()
    y = x
    for block in model:
        y = block(y, **keywords)
    y.float().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(x.isfinite().all() for x in (y, *gradients))
    # Other gradients are added in any order.
    sums[name] = [bits(x) for x in (y, *(gradients if name == "deterministic" else ()))]
with torch.no_grad():
    q = torch.randn(2, 1, HEADS, 64, device="cuda").bfloat16()
    caches = torch.randn(2, 2, 512, HEADS, 64, device="cuda").bfloat16()
    out = cute_flash.attn_decode(q, *caches, cache_seqlens=torch.tensor([7, 500], dtype=torch.int32, device="cuda"))
    sums["decode"] = [bits(out)]
found = {"sums": sums, "imports_compiler": "cutlass" in sys.modules, "pack_hits": kernels.cache_info().pack_hits}
print(json.dumps(found))
"""


def _steps(folder: Path, *, cache: Path, jit: bool) -> dict:
    cache.mkdir(mode=0o700, exist_ok=True)
    environment = {**os.environ, "CUTE_FLASH_CACHE_DIR": str(cache), "CUTE_FLASH_JIT": str(int(jit))}
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_training_step_compiles_nothing_and_its_bits_are_those_of_compiled_kernels(request, tmp_path):
    wheel = request.config.getoption("--pack")
    if wheel is None:
        pytest.skip("needs --pack=WHEEL")
    (tmp_path / "pack").mkdir()
    zipfile.ZipFile(wheel).extractall(tmp_path / "pack")
    packed = _steps(tmp_path / "pack", cache=tmp_path / "empty", jit=False)
    assert not list((tmp_path / "empty").glob("*.so"))
    assert not packed["imports_compiler"] and packed["pack_hits"] > 0
    (tmp_path / "none").mkdir()
    compiled = _steps(tmp_path / "none", cache=tmp_path / "cache", jit=True)
    assert compiled["imports_compiler"] and compiled["pack_hits"] == 0
    assert packed["sums"] == compiled["sums"]
