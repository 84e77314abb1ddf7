from __future__ import annotations

import torch

from profiling import mods
from profiling.features import Settings, run_features
from tests.profiling.fakes import FakeTimer

SMALL = Settings(head_dims=(8,), hidden=16, batch=2, seqlen=24, long=40, rounds=2, ms=1.0)


def test_all_cells_run():
    found = run_features(
        tuple(mods.KINDS), SMALL, FakeTimer(event_ms=1.0), torch.device("cpu"), cells=mods.KINDS
    )
    assert [one.kind for one in found] == ["function"] * 12 + ["documents"] * 2 + ["bias"]
    for one in found:
        # Without compiling, FlexAttention on the CPU has no gradient.
        assert all(name.startswith("flex") for name in one.errors), one.errors
        assert len(one.samples["fwd"]) >= 2


def test_sides_compute_the_same():
    for make in (mods.function_cells, mods.document_cells):
        for cell in make(SMALL, torch.device("cpu")):
            first, *others = (side.prepare("fwd").call() for side in cell.sides.values())
            for other in others:
                torch.testing.assert_close(other, first, rtol=2e-2, atol=2e-2)
