"""docs/hardware.md lists every architecture and the rates of every GPU that `spec.arch` knows."""

from __future__ import annotations

import re
from pathlib import Path

from cute_flash.spec.arch import ARCHS, GPUS, KIB

PAGE = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")


def test_rates_are_those_of_the_table() -> None:
    text = PAGE.split("## Rates")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    listed = {name: [float(cell.split()[0]) for cell in cells] for name, *cells in rows[2:]}
    expected = {
        name: [spec.num_sms, spec.l2_bytes >> 20, spec.tensor_tflops, spec.hbm_tbps, spec.clock_ghz]
        for name, spec in GPUS.items()
    }
    assert listed == expected


def test_every_architecture_has_a_row() -> None:
    for name, spec in ARCHS.items():
        (row,) = re.findall(rf"^\| .* \| {name} \|.*$", PAGE, re.MULTILINE)
        assert f"{spec.smem_per_cta // KIB} KB" in row or "those of" in row
        assert ("compiled, not run" in row) == (not spec.was_run)
