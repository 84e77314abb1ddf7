"""Context parallelism on one card: a dry run on the CPU, the record, and the model of the documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from profiling import __main__ as cli
from profiling.documents import plot_cp
from profiling.studies import context_parallel
from profiling.studies.context_parallel import DRY_SETTINGS
from tests.profiling.fakes import FakeTimer, tools

pytestmark = pytest.mark.usefixtures("few_calls")


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cp.json"
    assert cli.main(["context-parallel", "--dry-run", "--seqlen", "128", "--ranks", "2", "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["settings"]["ranks"] == 2 and record["is_dry_run"]
    # Each rank of two has one call for its own shard and one for the other.
    assert [found["calls_of_a_rank"] for found in record["directions"].values()] == [2, 2]
    for direction in ("forward", "backward"):
        assert {"unsharded", "rank 0", "rank 1"} <= set(record["directions"][direction]["ms"])
    assert all(error < 0.02 for error in record["errors"].values())
    assert "sum / unsharded" in capsys.readouterr().out and path.with_suffix(".txt").exists()


@pytest.mark.slow
def test_the_ratio_sums_over_ranks() -> None:
    record = context_parallel.STUDY.measure(DRY_SETTINGS, tools(FakeTimer()))
    for found in record["directions"].values():
        ranks = [found["ms"][f"rank {i}"] for i in range(DRY_SETTINGS.ranks)]
        assert found["ratio"] == pytest.approx(sum(ranks) / found["ms"]["unsharded"])
        assert found["slowest_rank"] == pytest.approx(max(ranks) * DRY_SETTINGS.ranks / found["ms"]["unsharded"])
    assert not context_parallel.failures(record), "a dry run has no goal"
    record["is_dry_run"] = False
    assert "forward, sum / unsharded: 4" in str(context_parallel.failures(record)[0])
    record["directions"]["forward"]["ratio"] = 1.05
    assert [one.cell for one in context_parallel.failures(record)] == ["backward"]


@pytest.mark.slow
def test_groups_are_those_of_the_ring() -> None:
    settings = replace(DRY_SETTINGS, ranks=8, heads=4, heads_kv=1)
    record = context_parallel.STUDY.measure(settings, tools(FakeTimer()))
    # Rank 0 sees only later shards: one call for its own shard, and one for each group.
    assert {name: found["calls_of_a_rank"] for name, found in record["directions"].items()} == {
        "forward": 3,
        "backward": 4,
    }
    assert all(error < 0.02 for error in record["errors"].values())


def test_lengths_must_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["context-parallel", "--dry-run", "--seqlen", "100", "--ranks", "8"]) == 2
    assert "use a multiple of 16" in capsys.readouterr().err


@pytest.mark.slow
def test_the_table_of_the_model() -> None:
    rows = plot_cp.table().rows
    assert [row[1] for row in rows] == 2 * [str(n) for n in plot_cp.RANKS]
    assert rows[2][:3] == ("NVLink", "8", "65,536") and rows[-1][5] == "-"
