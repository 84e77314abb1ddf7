"""flash-attention's own tests through the adapters, as a pytest file; see `tests.upstream`.

Ordinary test runs do not collect this file, because its name is not test_*.py. v2.8.3 has 677,219 cases without FP8.
The population is the 340,306 of them that `excluded` does not exclude; OUT/fa/record/population.txt has the numbers for
each test and reason. 842 cases of the population are sampled.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash.integrations import flash_attn_3
from tests.upstream.jobs import Job, share
from tests.upstream.recording import HAS_GPU
from tests.upstream.sampling import Case, Params, axes_of, population, population_table, sample

FILES = {"test_flash_attn": "tests/test_flash_attn.py", "test_flash_attn_hopper": "hopper/test_flash_attn.py"}
# Edits of the hopper file: the adapter has no Dv = 512.
HOPPER_EDITS = {"[256, 512, d]": "[256, d]"}
CPU_EDITS = {'device = "cuda"': 'device = "cpu"', 'device="cuda"': 'device="cpu"', "torch.cuda.synchronize()": "None"}
H200 = SimpleNamespace(total_memory=141 << 30, major=9, minor=0, name="H200", multi_processor_count=132)

# (file, test): (number of sampled cases, cases per group); the cases of a group differ in `sampling.LENGTHS` only
QUOTAS = {
    ("test_flash_attn", "test_flash_attn_qkvpacked"): (48, 8),
    ("test_flash_attn", "test_flash_attn_varlen_qkvpacked"): (54, 9),
    ("test_flash_attn", "test_flash_attn_output"): (100, 10),
    ("test_flash_attn", "test_flash_attn_varlen_output"): (100, 10),
    ("test_flash_attn", "test_flash_attn_causal"): (60, 10),
    ("test_flash_attn", "test_flash_attn_varlen_causal"): (60, 10),
    ("test_flash_attn", "test_flash_attn_splitkv"): (50, 10),
    ("test_flash_attn", "test_flash_attn_kvcache"): (120, 6),
    ("test_flash_attn", "test_flash_attn_race_condition"): (6, 3),
    ("test_flash_attn", "test_flash_attn_bwd_overflow"): (20, 5),
    ("test_flash_attn", "test_flash_attn_bwd_transpose"): (16, 4),
    ("test_flash_attn", "test_flash_attn_bwd_varlen_overflow"): (6, 1),
    ("test_flash_attn", "test_flash_attn_deterministic"): (24, 8),
    ("test_flash_attn", "test_flash_attn_varlen_deterministic"): (24, 8),
    ("test_flash_attn_hopper", "test_flash_attn_output"): (40, 10),
    ("test_flash_attn_hopper", "test_flash_attn_varlen_output"): (40, 10),
    ("test_flash_attn_hopper", "test_flash_attn_kvcache"): (48, 6),
    ("test_flash_attn_hopper", "test_flash_attn_combine"): (20, 5),
    ("test_flash_attn_hopper", "test_flash_attn_cluster"): (2, 1),
    ("test_flash_attn_hopper", "test_flash_attn_race_condition"): (4, 2),
}
# Cost of tests that repeat their calls, in units of an ordinary case.
COST = {"race_condition": 40.0, "deterministic": 4.0}
# Without a GPU, longer key sequences are shortened to this: they need the same kernels, and memory may be short.
MAX_CPU_SEQLEN = 20_000

ZERO_DQ = "one key: the exact dq and PyTorch's dq are 0, so the tolerance is 0; the dq of cute_flash is about 2e-6"
MAX_ZERO_DQ = 1e-5


def excluded(file: str, test: str, p: Params) -> str | None:
    """Why a case is not in the population: a skip of the test itself, or an option that the adapter does not have."""
    if p.get("dropout_p"):
        return "dropout: the test asks for the dropout mask (return_attn_probs)"
    if test == "test_flash3_bw_compatibility":
        return "checks schemas of flash_attn_3's torch operators, which the adapter does not have"
    if "float8" in str(p.get("dtype")):
        return "hopper: FP8 queries"
    if test != "test_flash_attn_kvcache":
        return None
    is_skipped = (p["seqlen_q"] > p["seqlen_k"] and p["new_kv"]) or (not p["new_kv"] and p["rotary_fraction"] > 0)
    if file == "test_flash_attn":
        is_paged = p["paged_kv_block_size"] is not None
        is_skipped |= is_paged and (p["has_batch_idx"] or p["has_leftpad"])
        return "skipped by the test itself" if is_skipped else None
    page = p["page_size"]
    is_skipped |= page is not None and p["seqlen_k"] % page != 0
    is_skipped |= p["rotary_fraction"] == 0 and p["has_rotary_seqlens"]
    return "skipped by the test itself" if is_skipped else None


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0, **options: Any
) -> Tensor:
    """The rotary embedding in plain torch: fp32, then rounded. That of flash-attention is a Triton kernel."""
    assert not any(options.values()), options
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    positions = (torch.arange(x.shape[1], device=x.device) + offsets).clamp(max=len(cos) - 1).long()
    cosines, sines = (table[positions].float().unsqueeze(-2) for table in (cos, sin))
    width = 2 * cos.shape[1]
    pairs = x[..., :width].float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    rotated = torch.stack((a * cosines - b * sines, a * sines + b * cosines), axis).flatten(-2)
    return torch.cat((rotated.to(x.dtype), x[..., width:]), -1)


def _module(name: str, **attributes: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(attributes)


def install(job: Job) -> None:
    """Make the modules that the test files import: flash_attn 2, flash_attn_interface (flash-attn 3), helper files."""
    cute_flash.install_as_flash_attn(replace=True)  # other packages, such as FlashAttention-4, have that name too
    # Only used for the dropout mask.
    sys.modules["flash_attn.flash_attn_interface"]._get_block_size_n = None  # type: ignore[attr-defined]
    _module("flash_attn.layers", __path__=[])
    _module("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb)
    _module(
        "flash_attn_interface",
        flash_attn_func=flash_attn_3.flash_attn_func,
        flash_attn_varlen_func=flash_attn_3.flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_3.flash_attn_with_kvcache,
        flash_attn_combine=flash_attn_3.flash_attn_combine,
        get_scheduler_metadata=flash_attn_3.get_scheduler_metadata,
    )
    sys.path.insert(0, str(job.source("flash-attention/hopper")))  # padding.py and test_util.py
    os.environ["FLASH_ATTENTION_DISABLE_FP8"] = "TRUE"
    if not HAS_GPU:
        torch.cuda.get_device_capability = lambda *args: (9, 0)
        torch.cuda.get_device_properties = lambda *args: H200  # type: ignore[assignment]


def load(name: str, job: Job) -> ModuleType:
    """A test file as a module, with the edits for the adapter. Edits do not change line numbers."""
    path = job.source(f"flash-attention/{FILES[name]}")
    text = path.read_text(encoding="utf-8")
    edits = (HOPPER_EDITS if name == "test_flash_attn_hopper" else {}) | ({} if HAS_GPU else CPU_EDITS)
    for old, new in edits.items():
        assert old in text or old in CPU_EDITS, f"{path} has no {old!r}: is it flash-attention v2.8.3?"
        text = text.replace(old, new)
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, str(path), "exec"), vars(module))
    if job.step == "record":
        module.attention_ref = lambda q, k, v, *args, **options: _stub(q, k, v)  # type: ignore[attr-defined]
        module.attention_kvpacked_ref = lambda q, kv, *args, **options: _stub(q, *kv.unbind(2))  # type: ignore[attr-defined]
        module.attention_qkvpacked_ref = lambda qkv, *args, **options: _stub(*qkv.unbind(2))  # type: ignore[attr-defined]
    return module


def _stub(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    """A cheap differentiable tensor with the shape of the result, in place of the tests' reference."""
    zero = (q.sum() + k.sum() + v.sum()) * 0
    return q.new_zeros(*q.shape[:-1], v.shape[-1]) + zero.to(q.dtype), None


def sampled(modules: dict[str, ModuleType]) -> list[Case]:
    cases: list[Case] = []
    for (file, test), (size, per_group) in QUOTAS.items():
        axes = axes_of(getattr(modules[file], test))
        cases += sample(file, test, axes, size, per_group, partial(excluded, file, test))
    return cases


def all_cases(modules: dict[str, ModuleType]) -> Counter[tuple[str, str]]:
    """The number of cases by test and reason for exclusion."""
    counts: Counter[tuple[str, str]] = Counter()
    for file, module in modules.items():
        for test, function in vars(module).items():
            if test.startswith("test_") and getattr(function, "__module__", None) == file:
                reasons = population(axes_of(function), partial(excluded, file, test))
                counts.update({(f"{file}::{test}", reason): number for reason, number in reasons.items()})
    return counts


def is_zero_dq(error: AssertionError) -> bool:
    """Whether the test compared dq with an exact 0, and ours is a rounding error away."""
    if "(dq - dq_ref)" not in (traceback.extract_tb(error.__traceback__)[-1].line or ""):
        return False
    values = list(traceback.walk_tb(error.__traceback__))[-1][0].f_locals
    return not values["dq_ref"].any() and not values["dq_pt"].any() and bool(values["dq"].abs().max() < MAX_ZERO_DQ)


_tests: dict[tuple[str, str], Callable[..., None]] = {}


def shard_group(case: Case) -> Hashable:
    """Cases of a group run in one process."""
    # These allocate 70 GB each, so they run one after another.
    return "race_condition" if "race_condition" in case.test else (case.file, case.test, case.group)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    job = Job.current()
    install(job)
    modules = {name: load(name, job) for name in FILES}
    _tests.update({(file, test): getattr(modules[file], test) for file, test in QUOTAS})
    if job.step == "record" and job.index == 0:
        (job.folder / "population.txt").write_text(population_table(all_cases(modules)) + "\n", encoding="utf-8")
    cost = {test: next((n for part, n in COST.items() if part in test), 1.0) for _, test in QUOTAS}
    cases = share(sampled(modules), job, shard_group, lambda c: cost[c.test])
    metafunc.parametrize("case", cases, ids=str)


def test_case(case: Case) -> None:
    params = dict(case.params)
    if not HAS_GPU and params.get("seqlen_k", 0) > MAX_CPU_SEQLEN:
        params["seqlen_k"] = MAX_CPU_SEQLEN
    try:
        _tests[case.file, case.test](**params)
    except AssertionError as error:
        if is_zero_dq(error):
            pytest.xfail(ZERO_DQ)
        raise
