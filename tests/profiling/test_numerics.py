"""The numerics study: accumulators, orders of keys, tables and figures, and the claims of its page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from cute_flash import reference
from cute_flash.spec.band import Band
from layouts.studies.loops import tiled_q_outer
from profiling import __main__ as cli
from profiling.documents import plot_numerics
from profiling.documents.plot_style import style, svg
from profiling.documents.sources import DATA, NUMERICS_CPU
from profiling.measure.accuracy import draw
from profiling.measure.study import OK
from profiling.studies import numerics, numerics_gpu, numerics_report
from profiling.studies.numerics import DISTRIBUTIONS, SMALL, WAYS
from profiling.studies.numerics_report import pick
from tests.fakes.cuda import claiming_cuda
from tests.fakes.gpu import fake_gpu
from tests.fakes.recording import kernels_of
from tests.profiling.fakes import FakeTimer, tools


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", [1, 7, 64, 100])
def test_every_way_computes_attention(way: str, block: int) -> None:
    q, k, v = replace(SMALL, rows=5, heads=2).inputs("normal", 64)
    errors = numerics.errors_of(WAYS[way](q, k, v, block), reference.dense(q, k, v)[0])
    assert errors.relative < 1e-6 and errors.max_abs < 2e-6


def test_kahan_keeps_what_fp32_loses() -> None:
    terms = [torch.tensor([1.0]), *[torch.tensor([1e-8])] * 1000]
    total = lost = torch.zeros(1)
    for term in terms:
        total, lost = numerics.kahan_add(total, lost, term)
    assert float(sum(terms)) == 1.0 and float(total) == pytest.approx(1.00001, rel=1e-7)
    assert float(numerics.kahan_sum(torch.cat(terms)[None])) == float(total)


def test_distributions() -> None:
    size = (100_000,)
    drawn = {name: draw(name, size, torch.Generator().manual_seed(0)) for name in DISTRIBUTIONS}
    assert float(drawn["normal"].std()) == pytest.approx(1.0, abs=0.02)
    far = {name: int((x.abs() > 6).sum()) for name, x in drawn.items()}
    assert far["normal"] == 0 < far["outliers"] < 100 < far["long-tailed"]
    # The variance of Student's t with 3 degrees of freedom is 3.
    assert float(drawn["long-tailed"].var()) == pytest.approx(3.0, rel=0.3)
    with pytest.raises(ValueError, match="uniform"):
        draw("uniform", size, torch.Generator())


@pytest.mark.parametrize("growing", [1, 2, 5, 16])
def test_the_order_of_the_keys_sets_the_number_of_rescales(growing: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.ones(1, 1, 3, 1), torch.randn(1, 1, 64, 1), torch.randn(1, 1, 64, 4)
    order = numerics.growing_order(k[0, 0, :, 0], 4, growing)
    assert sorted(order.tolist()) == list(range(64))
    _, _, traffic = tiled_q_outer(q, k[:, :, order], v[:, :, order], Band(), None, 3, 4)
    assert traffic.rescales == 3 * (growing - 1)


def test_a_dry_run_writes_both_files(tmp_path, capsys) -> None:
    out = tmp_path / "numerics.json"
    assert cli.main(("numerics", "--cpu", "--dry-run", "--out", str(out))) == OK
    data = json.loads(out.read_text())
    assert {one["study"] for one in data["records"]} == set(numerics.STUDIES)
    assert {one["distribution"] for one in data["records"]} == set(DISTRIBUTIONS)
    assert data["machine"]["source_digest"] in out.with_suffix(".txt").read_text()
    assert "fp64 after S" in capsys.readouterr().out


def test_the_gpu_part_in_a_dry_run(tmp_path, capsys, monkeypatch) -> None:
    """On the CPU; a peer without a kernel is absent, with its message, and the others go on."""
    small = replace(numerics_gpu.SMALL, lengths=(16,), distributions=("outliers",))
    monkeypatch.setattr(numerics_gpu, "GPU_STUDY", replace(numerics_gpu.GPU_STUDY, small=small))
    out = tmp_path / "gpu.json"
    assert cli.main(("numerics", "--gpu", "--dry-run", "--out", str(out))) == OK
    records = json.loads(out.read_text())["records"]
    assert {(one["dtype"], one["output"]) for one in pick(records, provider="cute_flash")} == {
        (dtype, output) for dtype in numerics_gpu.DTYPES for output in ("out", "dq", "dk", "dv")
    }
    assert all(one["relative"] < 0.02 for one in pick(records, provider="cute_flash"))
    assert all(one["absent"] for one in pick(records, provider="sdpa-efficient"))
    said = capsys.readouterr().out
    assert "absent: sdpa-efficient, fp32" in said and "out, S 16, bf16, cute_flash" in said


def test_kernels_to_compile() -> None:
    settings = replace(numerics_gpu.SMALL, dtypes=("bf16", "fp32"))
    with fake_gpu("sm_90"), claiming_cuda():
        names = {key.kernel for key in kernels_of(numerics_gpu.kernels(settings, tools(FakeTimer())))}
    assert {"fwd_sm90", "bwd_sm90", "fwd_sm80_fp32", "bwd_sm80_fp32"} <= names


# ---- the checked-in run

needs_record = pytest.mark.skipif(not (DATA / NUMERICS_CPU).exists(), reason=f"waits for {NUMERICS_CPU}")


def checked_in() -> dict:
    return json.loads((DATA / NUMERICS_CPU).read_text(encoding="utf-8"))


@needs_record
def test_the_run_is_complete_and_names_its_source() -> None:
    data = checked_in()
    sizes = numerics.Sizes()
    assert data["settings"] == json.loads(json.dumps(sizes.__dict__))
    lengths = pick(data["records"], study="length")
    assert len(lengths) == len(DISTRIBUTIONS) * len(sizes.lengths) * (len(WAYS) + 1)
    assert data["machine"]["git_commit"] and data["machine"]["source_digest"]


@needs_record
def test_claims_of_the_page_hold_in_the_run() -> None:
    """These are the claims of docs/numerics-study.md."""
    records = checked_in()["records"]

    def relative(**conditions) -> list[float]:
        found = sorted(pick(records, **conditions), key=lambda one: (one["seqlen"], one["block"], one["rescales"]))
        return [one["relative"] for one in found]

    # Many rescales are no worse than none.
    by_rescales = relative(study="rescales", way="fp32")
    assert by_rescales[-1] <= by_rescales[0]
    # Most of the error is in the fp32 scores: fp64 after them removes less than half of it, at all lengths.
    fp32, after = (relative(study="length", distribution="normal", way=way) for way in ("fp32", "fp64 after S"))
    assert all(0.5 < b / a <= 1.0 for a, b in zip(fp32, after))
    # Kahan sums are as good as fp64 sums.
    kahan, sums = (relative(study="length", distribution="normal", way=way) for way in ("fp32, Kahan", "fp64 sums"))
    assert kahan == pytest.approx(sums, rel=0.05)
    # Narrow and very wide blocks are worse than 64 keys.
    by_tile = {one["block"]: one["relative"] for one in pick(records, study="tile", way="fp32", distribution="normal")}
    assert by_tile[64] < min(by_tile[4], by_tile[4096])


# ---- tables and figures


@pytest.fixture(scope="module")
def small() -> dict:
    records = [one for name in numerics.STUDIES for one in numerics.measure_study(name, SMALL)]
    machine = {"gpu": None, "git_commit": "0123456789"}
    return json.loads(json.dumps({"records": records, "settings": SMALL.__dict__, "machine": machine}))


def test_tables(small) -> None:
    tables = numerics_report.cpu_tables(small["records"])
    assert [len(table.rows) for table in tables] == [5, 5, 4, 3]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert tables[2].columns[1:] == ("0", "3", "15")


def test_figures(small) -> None:
    with style():
        figure = plot_numerics.accumulation(small, "title")
        assert "fp64 after S" in svg(figure) and len(figure.axes) == 3
        curve = figure.axes[2].lines[0]
        assert list(curve.get_xdata()) == [0.0, 3.0, 15.0]
        figure = plot_numerics.dtypes(small, "title")
        assert [axes.get_title(loc="left") for axes in figure.axes] == list(DISTRIBUTIONS)


def test_the_figure_of_the_gpu() -> None:
    results = [
        {"provider": peer.name, "dtype": dtype, "distribution": distribution, "seqlen": seqlen, "output": "out"}
        | {"relative": 1e-3, "max_abs": 1e-2, "max_exact": 1.0}
        for peer in numerics_gpu.PEERS
        for dtype in numerics_gpu.DTYPES
        for distribution in DISTRIBUTIONS
        for seqlen in (512, 2048)
    ]
    data = {"records": results, "settings": numerics_gpu.Settings().__dict__, "machine": {"gpu": "NVIDIA H200"}}
    with style():
        figure = plot_numerics.gpu(data, "title")
        said = svg(figure)
    assert "NVIDIA H200" in said and "SDPA math, unfused" in said
    assert len(figure.axes[0].lines) == len(numerics_gpu.PEERS) * len(numerics_gpu.DTYPES)
    assert len(numerics_report.gpu_out(data["records"]).rows) == 12
