"""The ladder without a GPU: every rung compiles, has one idea and few lines, and has the conflicts that it claims."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from cute_flash.spec.arch import ARCHS
from examples.ladder import harness
from examples.ladder.__main__ import BACKWARD, CASES, FORWARD, idea, main, rung_class
from examples.ladder.conflicts import report, uses

NAMES = [*FORWARD, *BACKWARD]
MAX_LINES = 160
# The instructions that multiply.
MULTIPLIES = {"0": "FFMA", "1": "FFMA", "6": "HGMMA", "7": "HGMMA", "8": "HGMMA"}
# Bytes that rungs spill at D = 128.
SPILLS = {"2": 8, "5": 40, "B1": 40, "B2": 52}


@pytest.mark.compiles
@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES)), ids=NAMES)
def test_a_rung_compiles(number: int, name: str) -> None:
    head_dim, is_causal = CASES[number % len(CASES)]
    rung = rung_class(name)(head_dim, is_causal)
    found, _ = harness.compile_rung(rung, rung.ARCH)
    assert found.sass[MULTIPLIES.get(name, "HMMA")] > 0
    assert found.spill_bytes <= SPILLS.get(name, 0) and not found.serialised_wgmma
    assert found.smem_bytes <= ARCHS[rung.ARCH.removesuffix("a")].smem_per_cta


@pytest.mark.parametrize("name", NAMES)
def test_a_rung_is_short_and_starts_with_its_idea(name: str) -> None:
    path = Path(inspect.getfile(rung_class(name)))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert lines[0].startswith(f'"""Rung {name}: ') and idea(name)


def test_a_swizzle_and_padding_remove_the_conflicts_of_plain_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for head_dim in harness.HEAD_DIMS:
        plain, swizzled = ({use.name: use for use in uses(rung_class(name)(head_dim, False))} for name in ("2", "3"))
        for name, use in plain.items():
            is_copy = name.startswith("copy")
            assert use.wavefronts == swizzled[name].wavefronts * (1 if is_copy else 8), name
        assert not any(use.conflicts for use in swizzled.values())
        with monkeypatch.context() as patch:
            patch.setattr(rung_class("3"), "variant", "padded")
            padded = {use.name: use for use in uses(rung_class("3")(head_dim, False))}
        for name, use in padded.items():
            # Padded rows straddle the 128-byte lines that cp.async writes.
            assert bool(use.conflicts) == name.startswith("copy"), name
        assert re.search(rf"ldmatrix of K +64 x {head_dim} plain", report(rung_class("2")(head_dim, False)))


def test_a_swizzle_removes_the_conflicts_of_the_backward() -> None:
    for head_dim in harness.HEAD_DIMS:
        plain, swizzled = ({use.name: use for use in uses(rung_class(name)(head_dim, False))} for name in ("B2", "B3"))
        assert len(plain) == 8 and not any(use.conflicts for use in swizzled.values())
        assert all(use.wavefronts == 8 * swizzled[name].wavefronts for name, use in plain.items() if "copy" not in name)
        assert {use.name for use in uses(rung_class("B1")(head_dim, False))} < set(plain)


def test_the_command_names_the_rungs(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ladder", "17"])
    with pytest.raises(SystemExit):
        main()
    assert "no rung 17; there are 0, 1, 2" in capsys.readouterr().err
