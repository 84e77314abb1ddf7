"""The record of the support table names the source that ran."""

from __future__ import annotations

import json
import sys

import pytest

from profiling.measure import machine
from tests.gpu import support

FACTS = {"git_commit": "abc", "source_digest": "d1", "gpu": "NVIDIA H200"}
CALL = {"family": "sm90", "dtype": "fp16", "directions": ["forward", "backward"], "rows": ["causal or one bound"]}


def test_a_record_has_the_commit_and_the_digest(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(machine, "facts", lambda: FACTS)
    for family in ("sm80", "sm90"):
        support.write(str(tmp_path / "calls"), family, f"{family}: 1 combination", [{**CALL, "family": family}])
    monkeypatch.setattr(sys, "argv", ["support", str(tmp_path / "calls"), str(tmp_path / "support.json")])
    support.main()
    record = json.loads((tmp_path / "support.json").read_text())
    assert record["machine"] == FACTS and len(record["ran"]) == 2
    assert record["right"]["causal or one bound"]["sm90 backward fp16"] == 1


@pytest.mark.parametrize("name", support.SAME)
def test_runs_of_different_source_are_no_record(monkeypatch, tmp_path, name: str) -> None:
    for family, facts in (("sm80", FACTS), ("sm90", {**FACTS, name: "other"})):
        monkeypatch.setattr(machine, "facts", lambda facts=facts: facts)
        support.write(str(tmp_path), family, family, [CALL])
    with pytest.raises(ValueError, match=f"runs of different {name}"):
        support.record(tmp_path)
