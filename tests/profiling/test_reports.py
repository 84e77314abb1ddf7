"""The files under profiling/reports are complete, small and consistent."""

from __future__ import annotations

import json

import pytest

from profiling.counters import ncu_run
from profiling.counters.ncu_case import case_of
from profiling.counters.ncu_metrics import ABSENT
from profiling.documents.sources import COUNTERS, DATA, read
from tests.counter_checks import CONFLICTS, disagreements

FOLDER = (DATA / COUNTERS).parent
MAX_REPORT_BYTES, MAX_BYTES = 300_000, 4_000_000
CASES = read(COUNTERS)["cases"]


@pytest.mark.slow
def test_the_record_is_what_the_exports_say() -> None:
    before = {path.name: path.stat().st_mtime_ns for path in FOLDER.iterdir()}
    _, record = ncu_run.from_folder(FOLDER)
    # The comparison below must not write the files that it compares.
    assert before == {path.name: path.stat().st_mtime_ns for path in FOLDER.iterdir()}
    written = json.loads(json.dumps(record))
    assert written == read(COUNTERS), (
        "out of date: run python -m profiling ncu --from-exports --out profiling/reports/h200"
    )


def check(case_id: str, **changed: float | None) -> list[str]:
    record = CASES[case_id]
    measured = {**record["measured"], **changed}
    return disagreements(case_of(case_id, record["dtype"]), "9.0", measured, record["predicted"])


@pytest.mark.parametrize("case_id", CASES)
def test_counters_agree_with_the_predictions(case_id: str) -> None:
    assert check(case_id) == []
    assert {name for name, value in CASES[case_id]["measured"].items() if value is None} == set(ABSENT["9.0"])


@pytest.mark.parametrize("case_id", CASES)
def test_a_conflict_in_every_instruction_would_be_noticed(case_id: str) -> None:
    predicted = CASES[case_id]["predicted"]
    for name, wavefronts in CONFLICTS.items():
        doubled = predicted[name] + max(predicted[name], predicted[wavefronts])
        assert any(wrong.startswith(name) for wrong in check(case_id, **{name: doubled}))
        assert f"{name}: no value" in check(case_id, **{name: None})
    assert "ldsm_instructions: no value" in check(case_id, ldsm_instructions=None)


def test_every_case_has_its_report_and_its_text() -> None:
    for suffix in (".ncu-rep", ".txt", ".csv"):
        assert {path.stem for path in FOLDER.glob(f"*{suffix}")} == set(CASES), suffix


def test_reports_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) < MAX_BYTES
    assert {name for name, size in sizes.items() if size > MAX_REPORT_BYTES} == set()
