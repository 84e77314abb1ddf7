"""The parts of `tests.upstream` that need no source of another project: sampling, shards and summary."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from tests.upstream.jobs import Job, run_processes, share
from tests.upstream.sampling import Params, axes_of, population, population_table, sample
from tests.upstream.sdpa import LARGE, excluded, sampled
from tests.upstream.summary import Summary, add_checks, add_junit, summarize


@pytest.mark.parametrize("dtype", [object(), object()])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 2), (3, 4), (5, 6)])
def marked(seqlen_q: int, seqlen_k: int, causal: bool, dtype: object) -> None:
    """A test of another project; pytest does not collect this name."""


AXES = axes_of(marked)


def causal(params: Params) -> str | None:
    return "causal" if params["causal"] else None


def test_ids_are_those_of_pytest() -> None:
    ids = {case.id for case in sample("file", "test", AXES, 12, 3, lambda p: None)}
    assert len(ids) == 12
    assert {"1-2-False-dtype0", "5-6-True-dtype1"} <= ids


def test_groups_differ_in_lengths_only_and_the_sample_is_fixed() -> None:
    cases = list(sample("file", "test", AXES, 5, 2, causal))
    assert [case.group for case in cases] == sorted(case.group for case in cases)
    for group in {case.group for case in cases}:
        own = [case.params for case in cases if case.group == group]
        assert len(own) <= 2
        assert len({(p["causal"], p["dtype"]) for p in own}) == 1
    assert not any(case.params["causal"] for case in cases)
    assert cases == list(sample("file", "test", AXES, 5, 2, causal))


def test_the_population_counts_reasons() -> None:
    counts = population(AXES, causal)
    assert counts == {"causal": 6, "in the population": 6}
    table = population_table(Counter({("test", reason): number for reason, number in counts.items()}))
    assert table.splitlines()[0] == "12\tcollected"


def test_shards_share_all_cases_and_keep_groups() -> None:
    jobs = [Job("fa", "run", "sources", "out", index, 3) for index in range(3)]
    shares = [share(range(20), job, lambda x: x // 4, lambda x: 10.0 if x < 4 else 1.0) for job in jobs]
    assert sorted(x for own in shares for x in own) == list(range(20))
    assert shares[0] == [0, 1, 2, 3]  # the expensive group is alone
    groups = [{x // 4 for x in own} for own in shares]
    assert sum(map(len, groups)) == 5


def test_cases_of_sdpa() -> None:
    name = f"{LARGE}_size_1_seq_len_q_%d_seq_len_k_128_head_dim_64_is_causal_%s_dropout_p_%s_cuda"
    assert excluded(name % (128, True, "0_0")) is None
    assert excluded(name % (12, False, "0_0")) is None
    assert "different lengths" in (excluded(name % (12, True, "0_0")) or "")
    assert "dropout" in (excluded(name % (12, True, "0_48")) or "")
    assert excluded("test_other") == "not of the flash backend"
    names = [name % (length, False, "0_0") for length in range(300)] + ["test_flash_fail_fp32_cuda"]
    assert len(sampled(names, is_active=True)) == 161
    assert len(sampled(names, is_active=False)) == 24


JUNIT = """<testsuite tests="4" failures="1" errors="0" skipped="2">
<testcase name="test_case[a::b[1]]" time="2"/>
<testcase name="c" time="1"><failure message="m">x.py:1: in f
    assert wrong
E   AssertionError</failure></testcase>
<testcase name="d" time="0"><skipped type="pytest.xfail" message="known"/></testcase>
<testcase name="e" time="0"><skipped type="pytest.skip" message="Skipped: no"/></testcase>
<testcase name="interrupted" time="0"/>
</testsuite>"""


def test_summary() -> None:
    summary = Summary()
    add_junit(summary, ET.fromstring(JUNIT))
    rows = [
        {"mod": "m", "D": 64, "status": status, "seconds": 1.0, "out": {"ok": status == "passed"}}
        for status in ("passed", "refused", "failed")
    ]
    add_checks(summary, rows[:2], {"m": "reason"})
    assert (summary.passed, len(summary.failures), summary.expected) == (2, 1, {"known": 1, "m: reason": 1})
    assert summary.failures == [("c", "assert wrong | AssertionError")]
    add_checks(summary, rows[1:], {})
    assert len(summary.failures) == 3
    assert "2.0 s a::b[1]" in summary.text("title")


@pytest.mark.parametrize(("code", "seconds"), [("pass", 60.0), ("exit(3)", 60.0), ("import time; time.sleep(60)", 0.5)])
def test_unfinished_processes(tmp_path: Path, code: str, seconds: float) -> None:
    job = Job("fa", "run", "sources", str(tmp_path))
    codes = run_processes(job, 2, lambda own: [sys.executable, "-c", f"print({own.index})\n{code}"], seconds)
    summary = summarize(job.folder, {})
    assert summary.is_good == (codes == [0, 0]) == (code == "pass")
    assert len(summary.unfinished) == (0 if summary.is_good else 2)
