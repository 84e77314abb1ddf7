"""`profiling decode --mla` with fake peers and a fake clock on the CPU, and its launches on a fake GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec import arch
from profiling import __main__ as cli
from profiling.measure.study import NOT_MEASURED
from profiling.peers import flash_attention, flash_mla
from profiling.studies import decode, mla, mla_cases
from profiling.studies.decode_cases import Call
from profiling.studies.mla_cases import (
    APPENDED,
    CONTIGUOUS,
    FA3,
    FLASH_MLA,
    OURS,
    PARTS,
    PEERS,
    SCALE,
    SM80,
    VALUE_DIM,
    Case,
)
from tests.fakes.cuda import claiming_cuda
from tests.profiling.fakes import CpuGpu, FakeTimer, tools

CPU = torch.device("cpu")
MS = {OURS: 1.0, CONTIGUOUS: 0.75, SM80: 1.5, FA3: 2.0, FLASH_MLA: 3.0}
NO_KERNEL = "value_dim=512 on cuda: there is no kernel yet"

pytestmark = pytest.mark.usefixtures("few_calls")


@pytest.fixture(autouse=True)
def few_host_calls(monkeypatch):
    monkeypatch.setattr(decode, "HOST_CALLS", 2)
    monkeypatch.setattr(decode, "HOST_LOOPS", 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention of (B, T, H, D) over (B, S, 1, D), causal."""
    scores = torch.einsum("bthd,bsgd->bhts", q.double(), k.double()) * SCALE
    tokens, num_keys = scores.shape[2:]
    scores += torch.full((tokens, num_keys), -torch.inf, dtype=torch.float64).triu(num_keys - tokens + 1)
    return torch.einsum("bhts,bsgd->bthd", scores.softmax(-1), v.double()).to(q.dtype)


@pytest.fixture
def peers(monkeypatch):
    """FlashAttention-3 and FlashMLA with the signatures that the study uses."""

    def fwd(q, k, v, *, q_v, page_table, softmax_scale, is_causal, num_splits):
        assert softmax_scale == SCALE and num_splits == 0 and is_causal == (q.shape[1] > 1)
        assert q.shape[-1] == k.shape[-1] == 64 and q_v.shape[-1] == v.shape[-1] == VALUE_DIM
        if page_table is not None:
            k, v = (x[page_table.long()].flatten(1, 2) for x in (k, v))
        return attend(torch.cat([q, q_v], -1), torch.cat([k, v], -1), v), None

    def decode_pages(q, pages, table, lengths, value_dim, metadata, num_splits, *, softmax_scale, causal):
        assert softmax_scale == SCALE and metadata == "metadata" and pages.shape[1] == 64 and table.dtype == torch.int32
        assert causal == (q.shape[1] > 1)
        rows = pages[table.long()].flatten(1, 2)
        assert lengths.tolist() == [rows.shape[1]] * len(q)
        return attend(q, rows, rows[..., :value_dim]), None

    module = SimpleNamespace(
        flash_mla_with_kvcache=decode_pages, get_mla_metadata=lambda lengths, rows, heads_kv: ("metadata", None)
    )
    monkeypatch.setattr(flash_attention, "fa3_ops", lambda: SimpleNamespace(fwd=fwd))
    monkeypatch.setattr(flash_mla, "flash_mla_module", lambda: module)
    monkeypatch.setattr(mla_cases, "unavailable", dict)


@pytest.fixture
def run(monkeypatch):
    """`run(cute_flash=...)`: a record in which calls take the times of `MS`; the functions spoil results."""
    real = mla_cases.calls

    def measure(unavailable=None, **spoils):
        timer = FakeTimer()

        def timed(name: str, call: Call) -> Call:
            def timed_call() -> Tensor:
                timer.now_ms += MS[name]
                return spoils[name](call.call()) if name in spoils else call.call()

            return replace(call, call=timed_call)

        def calls(case: Case, device: torch.device, seed: int) -> dict[str, Call]:
            made = real(case, device, seed)
            # The contiguous call in place of peers, which are not here.
            plain = made.get(CONTIGUOUS, made[OURS])
            return {name: timed(name, plain if name in PEERS else call) for name, call in made.items()}

        monkeypatch.setattr(mla_cases, "calls", calls)
        monkeypatch.setattr(mla_cases, "unavailable", lambda: unavailable or {})
        return mla.STUDY.measure(mla.SMALL, tools(timer))

    return measure


def test_cells_of_each_part(run):
    record = run()
    assert [cell["part"] for cell in record["cells"]] == ["cells", "tokens", "pages", "pages", "lists", "fp8"]
    for cell in record["cells"]:
        ours = cell["sides"][OURS]
        assert ours["us"] == pytest.approx(1000) and ours["tbps"] == pytest.approx(cell["bytes"] / 1e-3 / 1e12)
        assert ours["tflops"] == pytest.approx(cell["flops"] / 1e-3 / 1e12)
        assert cell["exceeds_l2"] is False and not cell["wrong"]
        assert mla.speed_over(cell, FA3) == (None if cell["part"] == "fp8" else pytest.approx(2.0))
    fp8 = record["cells"][-1]
    assert fp8["sides"][CONTIGUOUS]["tbps"] == pytest.approx(fp8["sides"][OURS]["tbps"] * 2 / 0.75)
    host = record["host"]["us"]
    assert host.pop(APPENDED) < 1  # the clock does not advance in it
    assert host == pytest.approx({OURS: 1e3, SM80: 1.5e3, FA3: 2e3, FLASH_MLA: 3e3})
    assert not mla.failures(record) and not mla.STUDY.has_failed(record)
    json.dumps(record, allow_nan=False)


def test_tables(run):
    record = run()
    cells, caches, means, host = mla.tables(record)
    flops = 2 * 2 * 4 * 64 * (576 + 512)
    assert cells.rows[0][:5] == ("4", "1", "2", "64", f"1000.0, 0.00, {flops / 1e9:.0f}")
    assert [row[1] for row in cells.rows] == ["1", "2"] and cells.rows[0][-1] == "2.00"
    assert [row[0] for row in caches.rows] == ["pages of 64 rows", "pages of one row", "lists of 16 of 64 rows", "FP8"]
    assert caches.rows[0][-2:] == ("2.00", "0.75") and caches.rows[3][-2:] == ("-", "0.75")
    by_name = {row[0]: row[1:] for row in means.rows}
    assert by_name["one token, contiguous"] == ("1", "2.00", "2.00", "3.00", "1.50", "-")
    assert by_name["pages of one row"] == ("1", "2.00", "2.00", "-", "-", "0.75")
    assert by_name["FP8"] == ("1", "-", "-", "-", "-", "0.75")
    assert dict(host.rows)[OURS] == "1000.0"
    assert mla.notes(record)[0].startswith("The cache fits in L2: H=4 B=2 length 64, contiguous; ")


@pytest.mark.parametrize("part", PARTS)
def test_every_call_is_right(part, peers):
    settings = replace(mla.SMALL, parts=(part,))
    for case in settings.cases():
        errors = {name: mla.error_of(call, case.batch) for name, call in mla_cases.calls(case, CPU, 0).items()}
        assert all(error is not None and error < 0.005 for error in errors.values()), (case, errors)
        assert (FA3 in errors) == (part != "fp8")
        assert (FLASH_MLA in errors) == (case.cache in ("contiguous", "pages of 64 rows"))


def test_an_append_writes_the_same_row_again():
    calls = mla_cases.host_calls(Case(part="cells", heads=4, batch=2, length=64), CPU, 0)
    assert mla.error_of(calls[APPENDED], 2) == mla.error_of(calls[APPENDED], 2) < 0.005


@pytest.mark.parametrize("sequence", [0, 1])
def test_one_wrong_sequence_fails(run, sequence):
    def spoil(out: Tensor) -> Tensor:
        out[sequence] *= 1.05
        return out

    record = run(**{OURS: spoil})
    assert mla.STUDY.has_failed(record) and all(OURS in cell["wrong"] for cell in record["cells"])
    assert "H=4 B=2 length 64, contiguous, cute_flash: error 5.0e-02" in str(mla.failures(record)[0])
    assert " wrong" in mla.cell_table(record).rows[0][4] and mla.cell_table(record).rows[0][-1] == "-"


def test_a_wrong_or_missing_peer_has_no_ratio(run):
    record = run(**{FA3: torch.empty_like}, unavailable={FLASH_MLA: "not installed"})
    assert not mla.STUDY.has_failed(record) and "fa3: not finite" in str(mla.failures(record)[0])
    assert mla.cell_table(record).rows[0][-2:] == ("-", "-")
    # A mean over fewer cells says so.
    cells = [cell | {"wrong": []} for cell in record["cells"]]
    record["cells"] = [cells[0], cells[0] | {"wrong": [FA3]}]
    assert dict(row[:2] for row in mla.mean_table(record).rows)["4 heads"] == "1 of 2"


def test_a_call_without_a_kernel_has_a_reason_and_does_not_fail(run):
    def refuse(out: Tensor) -> Tensor:
        raise UnsupportedError(NO_KERNEL)

    record = run(**{OURS: refuse, SM80: refuse})
    assert not mla.STUDY.has_failed(record) and not mla.failures(record)
    row = mla.cell_table(record).rows[0]
    assert row[4] == row[5] == row[-1] == "-" and row[6].startswith("2000.0")
    names = "cute_flash (H=4 B=2 length 64, contiguous); cute_flash-sm80 (H=4 B=2 length 64, contiguous)"
    note = mla.notes(record)[0]
    assert note.startswith(f"No kernel for {names}") and note.endswith(f" others: {NO_KERNEL}")
    json.dumps(record, allow_nan=False)


def test_kernels_of_a_run_are_all_compiled_before_it(monkeypatch):
    """A run launches no kernel that `kernels` did not name. Without kernels for `value_dim` there are none of both."""
    launched = []

    def launch(key, operands):
        launched.append(key)
        operands["out"].zero_()

    monkeypatch.setattr(mla_cases, "unavailable", lambda: dict.fromkeys(PEERS, "none"))
    with use_gpu(CpuGpu(arch.ARCHS["sm_90"], launch)), claiming_cuda():
        keys = mla.kernels(mla.SMALL, tools(FakeTimer()))
        assert not launched
        record = mla.STUDY.measure(mla.SMALL, tools(FakeTimer()))
    assert set(launched) == set(keys) and len(keys) == len(set(keys))
    assert not record["cells"][0]["failures"]


def test_cells_and_sizes():
    settings = mla.Settings()
    cases = settings.cases()
    assert len({case.id for case in cases}) == len(cases) == 12 + 8 + 8 + 2 + 4
    assert {case.part for case in replace(settings, parts=("lists",), heads=(16,)).cases()} == {"lists"}
    with pytest.raises(ValueError, match="--parts fp8 --heads 64: no cell"):
        mla.check(replace(settings, parts=("fp8",), heads=(64,)))
    # 604 MB and 146 GFLOP.
    case = Case(part="cells", heads=128, batch=128, length=4096)
    assert case.cache_bytes(OURS) == 128 * 4096 * 576 * 2 and case.flops == 2 * 128 * 128 * 4096 * 1088


def test_the_option_mla_chooses_the_study(capsys):
    assert cli.main(("decode", "--mla", "--parts", "fp8", "--heads", "64")) == NOT_MEASURED
    assert "no cell has these heads" in capsys.readouterr().err
    assert cli.main(("decode", "--parts", "cells", "--dry-run")) == NOT_MEASURED
    assert "--parts, --dry-run: only with --mla" in capsys.readouterr().err
