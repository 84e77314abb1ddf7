"""pytest plugin for torch's test_transformers.py: a sample of the tests of the flash backend; see `tests.upstream`.

In the step `inactive`, the adapter is activated and deactivated again (`sdpa.restore`) before the tests. The tests need
a GPU.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any

import pytest
import torch

from cute_flash.integrations import sdpa
from tests.upstream.jobs import Job
from tests.upstream.sampling import SEED, population_table

FILE = "pytorch/test/test_transformers.py"
LARGE = "test_flash_attention_vs_math_ref_grads_batch"
INACTIVE_QUOTA = 24
# The number of sampled cases of a test. Of other tests in `TESTS`, all cases run.
QUOTAS = {
    LARGE: 160,
    "test_flash_attention_vs_math_ref_grads_nestedtensor": 24,
    "test_fused_attention_vs_math_ref_grads_cudagraph": 12,
    "test_causal_variants": 24,
    "test_fused_kernels_nested_broadcasting": 8,
}
# Tests that reach torch's flash attention operators.
TESTS = (
    *QUOTAS, "test_dispatch_fails_no_backend", "test_flash_atteention_large_bf16_nan_values",
    "test_flash_attention_fail_with_non_square_causal_attention", "test_flash_autocast_fp32", "test_flash_fail_fp32",
    "test_fused_attention_different_dk_dv", "test_fused_backwards_throws_determinism_warning",
    "test_fused_kernels_seq_len_0_inputs", "test_fused_kernels_seq_len_1_inputs", "test_fused_sdp_choice",
    "test_fused_sdp_priority_order", "test_invalid_fused_inputs", "test_invalid_inputs", "test_invalid_last_dim_stride",
    "test_invalid_sequence_lengths", "test_is_causal_equals_upper_left",
    "test_scaled_dot_product_attention_fused_kernels_packed",
    "test_scaled_dot_product_attention_fused_kernels_packed_accuracy", "test_sdp_flash_attention_grad_against_math",
    "test_singelton_head_dim_stride_ne_1", "test_unaligned_tensors",
)  # fmt: skip
# Part of a name: why the case is not in the population.
EXCLUDED = {
    r"dropout_p_0_[1-9]": "dropout: the test asks for the dropout mask (return_debug_mask)",
    r"kernel[12]_|cudnn|mem_eff": "another backend",
    r"test_fused_sdp_priority_order": "compares times of backends, while other processes use the GPU",
    r"test_causal_variants_compile": "needs inductor and is slow",
    # Causal, and seq_len_k is not seq_len_q.
    rf"{LARGE}(?=.*is_causal_True).*seq_len_q_(\d+)_(?!seq_len_k_\1_)": (
        "skipped by the test itself (causal with different lengths)"
    ),
}
# Start of a name: why cute_flash fails the test.
EXPECTED = {
    "test_flash_atteention_large_bf16_nan_values": (
        "scores above 2^31: fma(s, scale, -max * scale) overflows exp2 and gives NaN"
    ),
    "test_fused_backwards_throws_determinism_warning_fused_kernel0_warn_only_True": (
        "torch asks for deterministic gradients: cute_flash has them, and does not warn"
    ),
}


def kind(name: str) -> str | None:
    """The test of a case, or None if it does not reach the flash backend."""
    return max((test for test in TESTS if name.startswith(test)), key=len, default=None)


def excluded(name: str) -> str | None:
    """Why a case is not in the population."""
    if kind(name) is None:
        return "not of the flash backend"
    return next((reason for pattern, reason in EXCLUDED.items() if re.search(pattern, name)), None)


def sampled(names: Iterable[str], is_active: bool) -> list[str]:
    pools: dict[str, list[str]] = {}
    for name in sorted(names):
        test = kind(name)
        if test is not None and excluded(name) is None and (is_active or test == LARGE):
            pools.setdefault(test, []).append(name)
    chosen = []
    for test, pool in sorted(pools.items()):
        size = QUOTAS.get(test, len(pool)) if is_active else INACTIVE_QUOTA
        chosen += random.Random(f"{SEED}/sdpa/{test}").sample(pool, min(size, len(pool)))
    return chosen


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    job = Job.current()
    cuda = {item.name: item for item in items if item.parent is not None and "CUDA" in item.parent.name}
    mine = sampled(cuda, job.step != "inactive")[job.index :: job.processes]
    if job.index == 0:
        counts = Counter((kind(name) or "others", excluded(name) or "in the population") for name in cuda)
        (job.folder / "population.txt").write_text(population_table(counts) + "\n", encoding="utf-8")
    config.hook.pytest_deselected(items=[item for item in items if item.name not in mine])
    items[:] = [cuda[name] for name in mine]
    for item in items:
        reason = next((reason for test, reason in EXPECTED.items() if item.name.startswith(test)), None)
        if reason is not None and job.step == "run":
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_sessionstart(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        sdpa.activate()
        if Job.current().step == "inactive":
            sdpa.restore()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """After each test, the implementation is still the one of the step."""
    result = yield
    expected = None if Job.current().step == "inactive" else "CUTE_FLASH"
    assert torch.nn.attention.current_flash_attention_impl() == expected
    return result
