"""Compile gates of sm_120: the kernels of Ampere, compiled for it, fit into 99 KB and spill nothing.

`make test` compiles a sample where the sources of a kernel changed, and `--all-kernels` the kernels of all cases of the
lock for sm_80 and sm_86. Their names are those of the lock, which has no digests for sm_120.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from cute_flash.jit.resources import nvdisasm
from cute_flash.planning.launch import CompileKey
from cute_flash.spec.arch import ARCHS, SM_120
from tests.jit.gates import kernel_resources
from tests.lock.cases import AnyCase, cases, compile_key
from tests.lock.decode_cases import DecodeCase
from tests.lock.sources import compiles_all

CASES = {case.name: case for case in cases()}
# The tile of each head dim with the mask or the features that need the most registers, user mods, fp32, decode and FP8.
SAMPLE = (
    "fwd/sm80/sm_80/d64/bf16/window/softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm80/sm_80/d128/bf16/window/varlen+softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm80/sm_80/d256/bf16/full/softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm80/sm_86/d96/bf16/window/plain/main",
    "fwd/sm80/sm_86/d512/bf16/window/plain/main",
    "fwd/sm80/sm_86/d512/bf16/window/varlen+softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm80/sm_86/d192/bf16/full/score_mod-capped+mask_mod-prefix+bias-fp16-bhqk-pairs/main",
    "fwd/sm80/sm_80/d128/fp32/window/softcap+alibi+sinks+dropout+max_logit/main",
    "bwd/sm80/sm_80/d64/bf16/window/softcap+alibi+dropout/main",
    "bwd/sm80/sm_86/d96/bf16/window/plain/main",
    "bwd/sm80/sm_80/d128/bf16/window/varlen+deterministic/main",
    "bwd/sm80/sm_86/d192/bf16/left/deterministic/main",
    "bwd/sm80/sm_86/d256/bf16/causal/plain/main",
    "bwd/sm80/sm_86/d512/bf16/window/varlen+softcap+alibi+dropout+deterministic/main",
    "bwd/sm80/sm_80/d128/bf16/window/score_mod-alibi+mask_mod-window+bias-bf16-bhqk-pairs/main",
    "bwd/sm80/sm_86/d128/fp32/window/softcap+alibi+dropout/main",
    "decode/sm80/sm_80/d128/bf16/causal/page16+append+rotary_halves",
    "decode/sm80/sm_80/d128/bf16/window/rows32+fp8+softcap+alibi+sinks",
    "bwd/sm80/sm_80/d64/fp32/full/bias-fp32-bhqk-pairs/main",
    "fwd/sm80/sm_80/d128/fp32/window/plain/main",
    "fwd/sm80/sm_80/d128/fp32/chunk/plain/main",
    "decode/sm80/sm_80/d256/bf16/causal/plain",
    "decode/sm80/sm_80/d512/bf16/chunk/page16+append+rotary_halves",
    "decode/sm80/sm_80/d512/bf16/window/fp8+page1+softcap+alibi+sinks",
)


def on_sm_120(case: AnyCase) -> AnyCase:
    """The case on sm_120. Decoding has no kernel family there: its kernels start early and convert FP8."""
    return replace(case, arch="sm_120", **({"family": ""} if isinstance(case, DecodeCase) else {}))


def names_of_all() -> list[str]:
    """The cases of kernels that sm_120 has, each kernel once."""
    found: dict[CompileKey, str] = {}
    for name, case in CASES.items():
        if case.arch in ("sm_80", "sm_86"):
            found.setdefault(compile_key(on_sm_120(case)), name)
    return list(found.values())


@pytest.mark.compiles
@pytest.mark.kernels
@pytest.mark.parametrize("name", names_of_all() if compiles_all() else SAMPLE)
def test_a_kernel_keeps_everything_in_registers(name: str) -> None:
    key = compile_key(on_sm_120(CASES[name]))
    found = kernel_resources(key)
    assert found.target == key.target == "sm_120a"
    assert found.spill_bytes == found.stack_bytes == 0
    assert found.registers <= 255 and found.smem_bytes <= SM_120.smem_per_cta
    if nvdisasm() is not None:
        assert found.sass["HGMMA"] == 0
        assert found.sass["LDL"] == found.sass["STL"] == 0


def test_all_kernels_of_ampere_are_gated() -> None:
    names = names_of_all()
    assert set(SAMPLE) <= set(CASES)
    ampere = {compile_key(case).kernel for case in CASES.values() if case.arch in ("sm_80", "sm_86")}
    assert {compile_key(on_sm_120(CASES[name])).kernel for name in names} == ampere
    # sm_121 has the kernels of sm_120.
    for name in SAMPLE:
        key, other = (compile_key(replace(on_sm_120(CASES[name]), arch=arch)) for arch in ("sm_120", "sm_121"))
        assert other == replace(key, target=ARCHS["sm_121"].target)
