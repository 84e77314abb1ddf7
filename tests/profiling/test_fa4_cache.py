"""The kernels of FlashAttention-4 are compiled by several processes, before a run."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import replace

import pytest
import torch

from profiling.bench import fa4_cache
from profiling.bench.suites import SUITES
from profiling.measure.shapes import Shape
from profiling.measure.workers import Outcome
from profiling.peers.flash_attention import FA4_CACHE, fa4_forward

SHAPE = Shape(batch=3, heads=4, heads_kv=2, seqlen=64, head_dim=16, causal=True)


class FakePool:
    """Runs tasks in this process; `fails` are the indices of tasks that fail."""

    def __init__(self, size, environment, limit_s, fails=()):
        assert (size, environment) == (7, {FA4_CACHE: "1"})
        self.fails = fails

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, tasks):
        for i, task in enumerate(tasks):
            error = "RuntimeError: no kernel" if i in self.fails else task.function(*task.args)
            yield Outcome(i, error=error)


def test_each_kernel_has_a_shortest_and_a_longest_sequence():
    lengths = [replace(SHAPE, seqlen=n) for n in (256, 64, 128)]
    other = replace(SHAPE, causal=False)
    found = fa4_cache.representatives([*lengths, other])
    assert found == [(replace(other, batch=1),), tuple(replace(SHAPE, batch=1, seqlen=n) for n in (64, 256))]
    paper = fa4_cache.representatives(SUITES["paper"].shapes())
    assert len(paper) == 6 and all([shape.seqlen for shape in shapes] == [512, 16384] for shapes in paper)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_calls_of_all_kernels_and_a_failure(direction, monkeypatch):
    called = []

    def attend(q, k, v, causal):
        called.append((tuple(q.shape), tuple(k.shape), causal))
        return (q * k.sum() * v.sum(),)

    module = types.SimpleNamespace(flash_attn_func=attend)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(torch, "device", lambda name, real=torch.device: real("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.delenv(FA4_CACHE, raising=False)
    shapes = [replace(SHAPE, head_dim=d) for d in (16, 32, 8)]
    groups = fa4_cache.representatives(shapes)
    fa4_cache.fill(groups, direction, "bf16", 7, lambda *args: FakePool(*args, fails=(1,)))
    assert [q[1:] for q, _, _ in called] == [(64, 4, 8), (64, 4, 32)]
    assert all(q[0] == 1 and k[2] == 2 and causal for q, k, causal in called)
    # The run itself finds the kernels too.
    assert os.environ[FA4_CACHE] == "1"


def test_a_setting_of_the_user_is_kept(monkeypatch):
    monkeypatch.setenv(FA4_CACHE, "0")
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(flash_attn_func=lambda *x, causal: x))
    fa4_forward()
    assert os.environ[FA4_CACHE] == "0"
