"""`profiling decode` with fake peers and a fake clock on the CPU, and its launches on a fake GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec import arch
from profiling.documents import doc_results
from profiling.studies import decode, decode_cases
from profiling.studies.decode_cases import CUDNN, FA3, FLASH, OURS, VARIANTS, Call, Inputs, Shape, Sizes
from tests.fakes.cuda import claiming_cuda
from tests.profiling.fakes import CpuGpu, FakeTimer, tools

CPU, SIZES = torch.device("cpu"), Sizes(heads=4, heads_kv=2, head_dim=32)
SMALL = decode.Settings(
    cells=((1, 64), (5, 128)),
    variant_cells=((2, 64),),
    layer_cells=(),
    host_cell=(1, 64),
    sizes=SIZES,
    rounds=2,
    ms=2.0,
)

pytestmark = pytest.mark.usefixtures("few_calls")


def _timed(timer: FakeTimer, call: Call, ms: float, spoil=None) -> Call:
    def timed() -> torch.Tensor:
        timer.now_ms += ms
        return spoil(call.call()) if spoil else call.call()

    return replace(call, call=timed)


@pytest.fixture
def run(monkeypatch):
    """`run(cute_flash=..., fp8=...)`: a record in which calls of cute_flash take 1 ms; the functions spoil results."""
    real_calls, real_variants = decode_cases.library_calls, decode_cases.variants

    def measure(unavailable=None, **spoils):
        timer = FakeTimer()

        def calls(inputs: Inputs) -> dict[str, Call]:
            times = {OURS: 1.0, CUDNN: 3.0, FLASH: 2.0, FA3: 4.0}
            plain = real_calls(inputs)[OURS]
            return {name: _timed(timer, plain, ms, spoils.get(name)) for name, ms in times.items()}

        def variants(inputs: Inputs, seed: int) -> dict[str, Call]:
            made = real_variants(inputs, seed)
            times = dict.fromkeys(made, 1.0) | {"fp8": 0.5, "page 1": 1.25}
            return {name: _timed(timer, call, times[name], spoils.get(name)) for name, call in made.items()}

        monkeypatch.setattr(decode_cases, "library_calls", calls)
        monkeypatch.setattr(decode_cases, "variants", variants)
        monkeypatch.setattr(decode_cases, "unavailable", lambda: unavailable or {})
        return decode.STUDY.measure(SMALL, tools(timer))

    return measure


@pytest.fixture(autouse=True)
def few_host_calls(monkeypatch):
    monkeypatch.setattr(decode, "HOST_CALLS", 3)
    monkeypatch.setattr(decode, "HOST_LOOPS", 2)


def test_cells_variants_and_host_time(run):
    record = run()
    titles = [step.title for step in decode.steps(SMALL, tools(FakeTimer()))]
    assert titles == ["B=1 length 64", "B=5 length 128", "variants B=2 length 64", "host"]
    for cell in record["cells"]:
        assert decode.best_peer(cell) == FLASH and decode.over_best(cell) == pytest.approx(2.0)
        assert cell["bytes"] == 2 * 2 * cell["batch"] * cell["length"] * 2 * 32
        assert cell["sides"][OURS]["us"] == pytest.approx(1000)
        assert cell["sides"][OURS]["tbps"] == pytest.approx(cell["bytes"] / 1e-3 / 1e12)
    (variants,) = record["variants"]
    assert list(variants["sides"]) == list(VARIANTS)
    assert decode.over_plain(variants, "fp8") == pytest.approx(2.0)
    assert decode.over_plain(variants, "page 1") == pytest.approx(0.8)
    # Half the bytes in half the time.
    sides = variants["sides"]
    assert sides["fp8"]["tbps"] == pytest.approx(sides["plain"]["tbps"])
    assert record["host"]["us"] == pytest.approx({OURS: 1e3, CUDNN: 3e3, FLASH: 2e3, FA3: 4e3, f"{OURS}, append": 1e3})
    assert not decode.failures(record) and not decode.STUDY.has_failed(record)
    json.dumps(record, allow_nan=False)


def test_tables(run):
    cells, means, variants, layers, host = decode.tables(run())
    assert cells.rows[0] == ("1", "64", "1000.0, 0.00", "3000.0, 0.00", "2000.0, 0.00", "4000.0, 0.00", "2.00")
    assert means.rows == (("B ≤ 4", "1", "2.00", "2.00"), ("all", "2", "2.00", "2.00"))
    assert dict(variants.rows)["FP8 cache"] == "500.0 (2.00)"
    assert layers.rows == ()  # only on a GPU
    assert dict(host.rows)[OURS] == "1000.0"


def test_every_variant_is_right_on_the_cpu():
    inputs = Inputs.random(Shape(3, 128), SIZES, CPU, 0)
    made = decode_cases.variants(inputs, 0)
    errors = {name: decode.error_of(call, SIZES) for name, call in made.items()}
    assert set(errors) == set(VARIANTS)
    assert all(error is not None and error < 0.005 for error in errors.values()), errors
    # A second call appends the same row again.
    assert decode.error_of(made["append"], SIZES) == errors["append"]
    assert made[f"{decode_cases.TOKENS} tokens"].call().shape == (3, decode_cases.TOKENS, 4, 32)


@pytest.mark.parametrize("name", ["plain", "page 16", "append"])
def test_a_wrong_result_fails(run, name):
    record = run(**{name: lambda out: out * 1.05})
    assert decode.STUDY.has_failed(record) and record["variants"][0]["wrong"] == [name]
    assert f"B=2 length 64, {name}: error 5.0e-02" in str(decode.STUDY.failures(record)[0])
    assert " wrong" in decode.variant_table(record).rows[list(VARIANTS).index(name)][1]


def test_elements_that_are_not_written_are_seen(run):
    record = run(**{OURS: torch.empty_like})
    assert decode.STUDY.has_failed(record) and str(decode.STUDY.failures(record)[0]).endswith("cute_flash: not finite")
    json.dumps(record, allow_nan=False)


@pytest.mark.slow
def test_a_wrong_or_failing_peer_is_not_the_best(run):
    def fail(out):
        raise RuntimeError("no kernel")

    record = run(**{FLASH: lambda out: 2 * out, FA3: fail})
    assert not decode.STUDY.has_failed(record)
    assert {decode.best_peer(cell) for cell in record["cells"]} == {CUDNN}
    text = "\n".join(map(str, decode.failures(record)))
    assert "fa3: RuntimeError: no kernel" in text and "sdpa-flash: error" in text
    record = run(unavailable={FA3: "not installed"})
    assert all(FA3 not in cell["sides"] for cell in record["cells"])


def test_kernels_of_a_run_are_all_compiled_before_it(monkeypatch):
    """A run launches no kernel that `kernels` did not name."""
    launched = []

    def launch(key, operands):
        launched.append(key)
        operands["out"].zero_()

    monkeypatch.setattr(decode_cases, "unavailable", lambda: dict.fromkeys(decode.PEERS, "none"))
    with use_gpu(CpuGpu(arch.ARCHS["sm_90"], launch)), claiming_cuda():
        keys = decode.kernels(SMALL, tools(FakeTimer()))
        assert not launched
        decode.STUDY.measure(SMALL, tools(FakeTimer()))
    assert set(launched) == set(keys) and len(keys) == len(set(keys))
    statics = [key.static for key in keys if key.kernel == "decode"]
    assert {static.page_lookup for static in statics} == {"", "chunk", "row"}
    assert any(static.appends and static.rotary for static in statics) and any(static.is_fp8 for static in statics)
    assert {static.overlaps_previous for static in statics} == {True, False}, "both families"


def test_cells_and_sizes():
    assert len(decode.CELLS) == 12 and set(decode.VARIANT_CELLS) <= set(decode.CELLS)
    sizes = decode.Settings().sizes
    assert (sizes.heads, sizes.heads_kv, sizes.head_dim) == (32, 8, 128)
    assert Shape(64, 16384).kv_bytes(sizes) == 4 << 30


def test_tables_of_the_documents(run):
    record = run()
    cells = doc_results.decode_cells(record)
    assert cells.rows[1] == ("5", "128", "1000.0", "0.00", "3000.0", "2000.0", "4000.0", "**2.00**")
    line = doc_results.decode_line(record)
    assert "2.00 × for B ≤ 4" in line and "Commit `c`" in line
    assert dict(decode.variant_table(record).rows)["pages of one row"] == "1250.0 (0.80)"


def test_gaps_between_kernels() -> None:
    # The second kernel begins before the first ends; 3 us pass before the third, which contains the fourth.
    found = decode.gaps_of([(14.0, 20.0), (0.0, 6.0), (5.0, 11.0), (15.0, 16.0), (20.5, 21.0)])
    assert found == {"span_us": 21.0, "idle_us": 3.5, "largest_gap_us": 3.0}
    assert decode.gaps_of([])["idle_us"] is None


def test_table_of_layers() -> None:
    cell = {"batch": 8, "length": 64, "layers": 32, "graph_us": 100.0, "kernels": 32, "span_us": 99.0, "idle_us": 0.0}
    table = decode.layer_table({"layers": [cell | {"largest_gap_us": 0.0}]})
    assert table.rows == (("8", "64", "32", "100.0", "99.0", "0.0", "0.00"),)
