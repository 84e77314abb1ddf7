"""What is checked in under profiling/reports: complete, small, and in agreement with itself."""

from __future__ import annotations

import json

import pytest

from profiling import ncu_run
from profiling.figures import COUNTERS, DATA

FOLDER = (DATA / COUNTERS).parent
MAX_REPORT_BYTES, MAX_BYTES = 300_000, 4_000_000

pytestmark = pytest.mark.skipif(not (DATA / COUNTERS).exists(), reason=f"waits for {COUNTERS}")


def test_the_record_is_what_the_exports_say() -> None:
    _, record = ncu_run.from_folder(FOLDER)
    found = json.loads(json.dumps(record))
    written = json.loads((DATA / COUNTERS).read_text())
    assert written == found, "python -m profiling ncu --from-exports --out profiling/reports/h200"


def test_every_case_has_its_report_and_its_text() -> None:
    ids = json.loads((DATA / COUNTERS).read_text())["cases"]
    for suffix in (".ncu-rep", ".txt", ".csv"):
        assert {path.stem for path in FOLDER.glob(f"*{suffix}")} == set(ids), suffix


def test_reports_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) < MAX_BYTES
    assert {name for name, size in sizes.items() if size > MAX_REPORT_BYTES} == set()
