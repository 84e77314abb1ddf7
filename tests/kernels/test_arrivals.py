"""No warp releases a stage of shared memory before its loads from the stage have completed.

An mbarrier arrival does not wait for earlier loads of its thread (`Pipeline.empty_barrier`). The GPU test of the same
property is `tests/gpu/test_races.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from cute_flash.jit.resources import nvdisasm
from tests.jit.gates import kernel_resources
from tests.kernels.sass import NONE, Instruction, instructions, loads_before_arrivals
from tests.lock.cases import cases, compile_key

CASES = {case.name: case for case in cases()}
# Loads of a bias. In the forward LDS.128 loads dropout masks; in the backward it loads the coordinates of a tile, which
# are overwritten two tiles later.
LDMATRIX, MASKS = re.compile(r"LDSM"), re.compile(r"LDSM|LDS\.128")
KERNELS = {
    "fwd/sm90/sm_90/d64/bf16/full/bias-bf16-bhqk-aligned/main": LDMATRIX,
    "fwd/sm90/sm_90/d96/bf16/full/bias-bf16-bhqk-aligned/main": LDMATRIX,
    "fwd/sm90/sm_90/d128/bf16/causal/bias-bf16-bhqk-aligned/main": LDMATRIX,
    "fwd/sm90/sm_90/d128/bf16/causal/dropout+bias-bf16-bhqk-aligned/main": MASKS,
    "fwd/sm90/sm_90/d192/bf16/causal/bias-bf16-bhqk-aligned/main": LDMATRIX,
    "fwd/sm90/sm_90/d192v128/bf16/full/bias-bf16-bhqk-aligned/main": LDMATRIX,
    "fwd/sm90/sm_90/d256/bf16/window/bias-bf16-bhqk-aligned/main": LDMATRIX,
    "fwd/sm90/sm_90/d64/bf16/full/dropout/main": MASKS,
    "fwd/sm90/sm_90/d128/bf16/full/dropout/main": MASKS,
    "fwd/sm90/sm_90/d192/bf16/window/softcap+dropout/main": MASKS,
    "fwd/sm90/sm_90/d192/bf16/causal/dropout/main": MASKS,
    "fwd/sm90/sm_90/d192v128/bf16/causal/dropout/main": MASKS,
    "fwd/sm90/sm_90/d256/bf16/full/dropout/main": MASKS,
    "bwd/sm90/sm_90/d64/bf16/full/bias-bf16-bhqk-aligned/main": LDMATRIX,
    "bwd/sm90/sm_90/d64/bf16/causal/bias-bf16-bhqk-aligned-constant/main": LDMATRIX,
    "bwd/sm90/sm_90/d64/bf16/causal/softcap+score_mod-alibi+bias-bf16-bhqk-aligned/main": LDMATRIX,
    "bwd/sm90/sm_90/d128/bf16/causal/bias-bf16-bhqk-aligned-constant/main": LDMATRIX,
    "bwd/sm90/sm_90/d256/bf16/causal/bias-bf16-bhqk-aligned-constant/main": LDMATRIX,
}


@pytest.mark.compiles
@pytest.mark.kernels
@pytest.mark.skipif(nvdisasm() is None, reason="needs nvdisasm")
@pytest.mark.parametrize("name", KERNELS)
def test_arrivals_wait_for_loads(name: str) -> None:
    code, is_load = instructions(kernel_resources(compile_key(CASES[name])).cubin), KERNELS[name]
    loads = [one for one in code if is_load.match(one.opcode)]
    assert sum(one.sets != NONE for one in loads) > len(loads) // 4, "the control bits are read at their positions"
    assert any(one.opcode.startswith("SYNCS.ARRIVE") for one in code) and any(one.jumps_back for one in code)
    early = loads_before_arrivals(code, is_load)
    assert not early, "\n".join(f"{load.address:x} {load.text} is pending at {one.address:x}" for load, one in early)


def test_a_pending_load_is_found() -> None:
    def one(text: str, sets: int = NONE, *waits: int) -> Instruction:
        return Instruction(0, text, sets, frozenset(waits))

    load, other = one("LDSM.16.M88.4 R8, [R2]", 3), one("LDS R1, [R2]", 2)
    arrival = one("SYNCS.ARRIVE.TRANS64 RZ", NONE)
    use = one("FADD R8, R8, R9", NONE, 3)
    found = lambda *code: loads_before_arrivals(list(code), LDMATRIX)  # noqa: E731
    assert found(load, arrival) == [(load, arrival)]
    assert found(load, other, use, arrival) == []
    assert found(load, replace(use, waits=frozenset({2})), arrival) == [(load, arrival)]
    assert found(load, replace(use, waits=frozenset(), jumps_back=True))
    silent = replace(load, sets=NONE)
    assert found(silent, use, arrival) == [(silent, arrival)]
    assert found(silent, load, use, arrival) == []
    waiting = replace(arrival, waits=frozenset({3}))
    assert found(load, waiting) == []
