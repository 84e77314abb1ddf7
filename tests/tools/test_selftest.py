"""`cute-flash selftest` on the CPU: its calls, its oracle, its verdicts, its file and its tables."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cute_flash
from cute_flash import ops, ops_decode
from cute_flash.errors import UnsupportedError
from cute_flash.planning.launch import LaunchKey
from cute_flash.runtime import decode, launcher
from cute_flash.runtime.gpu import current_gpu, use_gpu
from cute_flash.spec import arch
from cute_flash.spec.arch import ARCHS, ArchSpec
from cute_flash.spec.family import requested_family, use_kernels
from cute_flash.tools import selftest, selftest_benchmark, selftest_calls
from cute_flash.tools.cli import main
from cute_flash.tools.selftest_benchmark import CELLS, LIBRARIES, OURS, Cell, Timing
from cute_flash.tools.selftest_calls import CALLS, Call
from cute_flash.tools.selftest_check import FAILED, REFUSED, RIGHT, WRONG, check, run
from cute_flash.tools.selftest_oracle import attention
from tests.fakes.recording import RecordingGpu

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
BY_NAME = {call.name: call for call in CALLS}
SMALL = [BY_NAME[name] for name in ("d64 causal, 17 tokens", "varlen full, one query each", "decode, pages, append")]


class Recorder(selftest.KeyRecorder, RecordingGpu):
    """Records the kernels of calls on CPU tensors, as `KeyRecorder` does on a GPU."""

    def __init__(self, spec: ArchSpec) -> None:
        RecordingGpu.__init__(self, spec)
        selftest.KeyRecorder.__init__(self)


def launched(call: Call, gpu: ArchSpec, family: str, monkeypatch: pytest.MonkeyPatch) -> list[LaunchKey]:
    """The compiled functions that a call and its gradients would launch on a GPU."""
    attend, decoding = ops.attention, ops_decode.decode

    def attention_of_gpu(q: Tensor, k: Tensor, v: Tensor, args: Any, returns_lse: bool = True) -> Any:
        x = [y.detach() for y in (q, k, v)]
        out, lse, _ = launcher.forward(*x, args, is_recorded=q.requires_grad)
        launcher.backward(out, lse if call.has_dlse else None, *x, out, lse, args)
        return attend(q, k, v, args, returns_lse)

    def decoding_of_gpu(*arguments: Any) -> Any:
        decode.run(*arguments)
        return decoding(*arguments)

    recorder = Recorder(gpu)
    with use_gpu(recorder), use_kernels(family), monkeypatch.context() as patch:
        patch.setattr(ops, "attention", attention_of_gpu)
        patch.setattr(ops_decode, "decode", decoding_of_gpu)
        run(call, "cpu")
    return list(recorder.keys)


@pytest.fixture
def one_thread() -> Any:
    """Small products are faster in one thread if several tests run at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_the_cpu_path_is_right(name: str, one_thread: None) -> None:
    """Every row is a valid call, and two implementations, the oracle and the CPU path, agree."""
    outcome = check(BY_NAME[name], "", "cpu")
    assert outcome.verdict == RIGHT, outcome
    assert outcome.ratio is not None and outcome.ratio < 0.7


@pytest.mark.parametrize(("q_len", "causal"), [(33, True), (33, False), (7, False)])
def test_the_oracle_is_sdpa(q_len: int, causal: bool) -> None:
    q, k, v = (torch.randn(4, n, 16, dtype=torch.float64) for n in (q_len, 33, 33))
    out, lse = attention(q, k[:2], v[:2], 0, {"causal": causal, "scale": 0.3})
    expected = scaled_dot_product_attention(q, k[:2], v[:2], is_causal=causal, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (4, q_len)


@pytest.mark.parametrize(
    ("gpu", "family", "most"), [("sm_80", "", 74), ("sm_86", "", 74), ("sm_90", "", 75), ("sm_90", "sm80", 32)]
)
@pytest.mark.slow
def test_gpus_have_kernels_for_all_calls(
    gpu: str, family: str, most: int, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """No call is refused, and the number of kernels to compile does not grow by accident."""
    keys = set()
    for call, chosen in selftest.planned_runs(ARCHS[gpu], ""):
        if chosen == family:
            keys.update(launched(call, ARCHS[gpu], family, monkeypatch))
    assert most - 5 <= len(keys) <= most


def test_a_call_is_planned_for_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("sm80", "sm90"):
        (forward, backward) = launched(BY_NAME["d64 causal, 17 tokens"], ARCHS["sm_90"], family, monkeypatch)
        assert forward.kernel == f"fwd_{family}"
        assert f"bwd_{family}" in [key.kernel for key in backward.keys]


def test_latent_calls_cover_both_kernels_and_lists(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    found = set()
    for name in [name for name in BY_NAME if "MLA" in name]:
        (key,) = launched(BY_NAME[name], ARCHS["sm_90"], "", monkeypatch)
        static = key.static
        found.add((key.kernel, static.page_lookup, static.appends, static.is_fp8, static.has_query_tables))
    assert found == {
        ("decode_latent", "", False, False, False),
        ("decode_latent_sm90", "chunk", False, False, False),
        ("decode_latent_sm90", "row", True, False, False),
        ("decode_latent", "chunk", False, True, False),
        ("decode_latent_sm90", "row", False, False, True),
    }


def test_a_row_that_a_list_names_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call, attend = BY_NAME["decode, MLA, a list for each query"], selftest_calls.attn_decode

    def next_rows(*tensors: Tensor, page_table: Tensor, **keywords: Any) -> Any:
        return attend(*tensors, page_table=page_table.roll(1, dims=1), **keywords)

    monkeypatch.setattr(selftest_calls, "attn_decode", next_rows)
    assert check(call, "", "cpu").verdict == WRONG


def test_kernels_are_compiled_before_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once; `check` reports the exception of a call, not the compilation."""
    compiled: list[Any] = []

    def record(call: Call, device: str) -> None:
        current_gpu().kernel(call.name)  # type: ignore[arg-type]
        raise UnsupportedError("no backward")

    monkeypatch.setattr(selftest, "run", record)
    monkeypatch.setattr(Cell, "run_of", lambda cell, library: partial(current_gpu().chain, cell.name))
    monkeypatch.setattr(selftest, "precompile_all", lambda keys, jobs: map(compiled.append, keys))
    selftest.compile_first([(call, "") for call in (*SMALL, *SMALL)], CELLS[:1])
    assert compiled == [*[call.name for call in SMALL], CELLS[0].name]
    assert selftest.num_jobs() >= 1


def test_families() -> None:
    def families(gpu: str, family: str = "") -> dict[str, int]:
        chosen = [name for _, name in selftest.planned_runs(ARCHS[gpu], family)]
        return {name: chosen.count(name) for name in chosen}

    core = sum(call.is_core for call in CALLS)
    assert 5 < core < len(CALLS) / 2
    assert families("sm_90") == {"": len(CALLS), "sm80": core}
    assert families("sm_80") == {"": len(CALLS)}
    assert families("sm_90", "sm80") == {"sm80": len(CALLS)}
    with pytest.raises(UnsupportedError, match="sm_86 has no wgmma; use sm80"):
        selftest.planned_runs(ARCHS["sm_86"], "sm90")


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run_small() -> tuple[int, dict[str, Any]]:
        path = tmp_path / "result.json"
        status = selftest.selftest([(call, "") for call in SMALL], path, (), "cpu")
        return status, json.loads(path.read_text())

    return run_small


def test_the_file_and_the_table(
    report: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture
) -> None:
    status, found = report()
    out = capsys.readouterr().out
    assert status == 0 and f"{len(SMALL)} right\n" in out and "WRONG" not in out
    assert found["format"] == 1 and found["gpu"] == {"name": "cpu"} and found["benchmark"] == []
    assert found["versions"]["cute-flash"] == cute_flash.__version__
    assert found["versions"]["torch"] == torch.__version__
    for call, entry in zip(SMALL, found["calls"], strict=True):
        assert (entry["call"], entry["verdict"]) == (call.name, RIGHT)
        assert 0 < entry["ratio"] < 0.7 and f"{entry['ratio']:.2f} {entry['result']}" in out
        assert any(call.name in line and RIGHT in line for line in out.splitlines())
    assert set(found) == {"format", "date", "seconds", "gpu", "versions", "states", "calls", "benchmark"}
    assert "/" not in json.dumps(found)  # no path


@pytest.mark.parametrize(
    ("change", "result"),
    [
        (lambda out, lse: (out + (out.roll(1, dims=-2) - out).detach(), lse), "out"),
        (lambda out, lse: (out, lse + 1e-3), "lse"),
        (lambda out, lse: (out * torch.where(torch.arange(out.shape[-1]) == 3, torch.nan, 1.0), lse), "out"),
        (lambda out, lse: (out.detach() + 0.9 * (out - out.detach()), lse), "d"),
    ],
)
def test_a_wrong_result_is_reported(
    change: Callable[..., tuple[Tensor, Tensor]], result: str, report: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    attend = selftest_calls.attn
    monkeypatch.setattr(selftest_calls, "attn", lambda *x, **a: change(*attend(*x, **a)))
    status, found = report()
    verdicts = {entry["call"]: entry for entry in found["calls"]}
    wrong = verdicts.pop("d64 causal, 17 tokens")
    assert status == 1 and wrong["verdict"] == WRONG and wrong["result"].startswith(result)
    assert {entry["verdict"] for entry in verdicts.values()} == {RIGHT}
    out = capsys.readouterr().out
    assert "1 WRONG" in out and any("17 tokens" in x and WRONG in x for x in out.splitlines())


@pytest.mark.parametrize(
    ("error", "verdict", "expected"),
    [(UnsupportedError("no kernel"), REFUSED, 0), (RuntimeError("in /home/somebody/x.py"), FAILED, 1)],
)
def test_an_exception_is_reported_without_its_message(
    error: Exception, verdict: str, expected: int, report: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise error

    monkeypatch.setattr(selftest_calls, "attn", fail)
    status, found = report()
    entry = found["calls"][0]
    assert (status, entry["verdict"], entry["exception"]) == (expected, verdict, type(error).__name__)
    assert str(error) not in json.dumps(found)
    captured = capsys.readouterr()
    assert str(error) in captured.err and f"1 {verdict}" in captured.out


def test_other_bits_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    call = replace(BY_NAME["d128 causal, deterministic"], queries=(40,))
    assert check(call, "", "cpu").verdict == RIGHT
    attend, runs = selftest_calls.attn, itertools.count()
    monkeypatch.setattr(selftest_calls, "attn", lambda *x, **a: [y * (1 + 1e-6 * next(runs)) for y in attend(*x, **a)])
    assert "other bits" in check(call, "", "cpu").message


def test_uninitialized_memory_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that no kernel writes holds NaN."""
    monkeypatch.setattr(selftest_calls, "attn_decode", lambda q, *x, **a: (torch.empty_like(q), torch.empty(3, 8, 1)))
    outcome = check(BY_NAME["decode"], "", "cpu")
    assert outcome.verdict == WRONG and outcome.ratio is None
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_append_to_a_wrong_row_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = selftest_calls.attn_decode

    def decode_and_overwrite(q: Tensor, k_cache: Tensor, *others: Tensor, **keywords: Any) -> Any:
        results = decoding(q, k_cache, *others, **keywords)
        k_cache[-1, -1] = 0.0
        return results

    monkeypatch.setattr(selftest_calls, "attn_decode", decode_and_overwrite)
    assert check(BY_NAME["decode, pages, append"], "", "cpu").verdict == WRONG


def test_the_benchmark_table(capsys: pytest.CaptureFixture) -> None:
    flash, cudnn = (library for library in LIBRARIES if library != OURS)
    timings = [
        Timing("d64 causal forward", {OURS: 2.0, flash: 3.0}, {OURS: 123.0, flash: 82.0}, {OURS: 0.1, flash: 0.1}),
        Timing("d64 causal backward", {}, {}, {}),
    ]
    assert (timings[0].ratio(flash), timings[0].ratio(cudnn), timings[1].ratio(flash)) == (1.5, None, None)
    Console(width=120).print(selftest.benchmark_table(timings))
    forward, backward = [line.split() for line in capsys.readouterr().out.splitlines() if "d64" in line]
    assert forward[-4:] == ["2", "123", "1.50", "-"] and backward[-4:] == ["-"] * 4


def test_cells_are_timed_in_interleaved_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The medians, with a library that does not support the GPU."""
    order: list[str] = []

    def run_of(cell: Cell, library: str) -> Callable[[], None]:
        if library == "SDPA cuDNN":
            raise RuntimeError("No available kernel")
        return partial(order.append, library)

    monkeypatch.setattr(Cell, "run_of", run_of)
    monkeypatch.setattr(selftest_benchmark, "_milliseconds", lambda run, calls: run() or 4.0)
    timing = selftest_benchmark.measure(CELLS[0])
    assert timing.milliseconds == {OURS: 4.0, "SDPA flash": 4.0}
    assert timing.tflops[OURS] == pytest.approx(CELLS[0].flops / 4e-3 / 1e12)
    assert {tuple(order[i : i + 3]) for i in range(4, len(order), 3)} == {(OURS,) * 3, ("SDPA flash",) * 3}


def test_states_are_those_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="abc"))
    commands = []

    def answer(command: tuple[str, ...], **keywords: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(stdout="580.1, 1980, 1980, 3201, 600.5, 700.0, 50\n")

    monkeypatch.setattr(subprocess, "run", answer)
    state = selftest.gpu_state("cuda")
    assert (state["driver"], state["sm_mhz"], state["temperature_c"]) == ("580.1", "1980", "50")
    assert "GPU-abc" in commands[0]
    monkeypatch.setattr(subprocess, "run", lambda *x, **a: (_ for _ in ()).throw(FileNotFoundError()))
    assert selftest.gpu_state("cuda") == {}


def test_the_name_of_the_file() -> None:
    name = "cute-flash-selftest-nvidia-geforce-rtx-4090.json"
    assert selftest.default_path("NVIDIA GeForce RTX 4090") == Path(name)


@needs_no_gpu
def test_without_a_gpu_one_line_names_what_runs(capsys: pytest.CaptureFixture) -> None:
    assert main(["selftest"]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1
    assert all(name in captured.err for name in ("no CUDA GPU", "cute-flash demo", "cute-flash doctor"))


def test_documents_have_the_number_of_calls() -> None:
    root = Path(__file__).parents[2]
    assert f"It makes {len(CALLS)} calls:" in (root / "docs/hardware.md").read_text()
    assert f"on your GPU: {len(CALLS)} kinds of calls" in (root / "README.md").read_text()


def test_a_family_is_that_of_the_benchmark_too(monkeypatch: pytest.MonkeyPatch) -> None:
    families: list[str] = []
    monkeypatch.setattr(arch, "has_gpu", lambda: True)
    monkeypatch.setattr(arch, "detect", lambda index: ARCHS["sm_90"])
    monkeypatch.setattr(selftest, "selftest", lambda *arguments: families.append(requested_family()) or 0)
    for argv in (["selftest", "--family", "sm80"], ["selftest"]):
        assert main(argv) == 0
    assert families == ["sm80", ""]
