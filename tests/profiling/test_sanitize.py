"""`python -m profiling sanitize` with a fake compute-sanitizer, and its launches on the CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from cute_flash.planning.registry import KERNELS
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec import arch
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.features import FEATURES
from cute_flash.tools.explain_decode import DecodeExplanation, DecodeShape
from profiling import __main__ as cli
from profiling.counters import sanitize, sanitize_case
from profiling.counters.sanitize_case import Launch, launches
from profiling.measure import machine
from profiling.measure.study import NOT_MEASURED, OK
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.recording import kernels_of
from tests.profiling.fakes import CpuGpu

TWO = launches(only="sm90-d64-*-dropout")
RACE = (
    "========= Error: Race reported between Write access at produce+0x10 in file.py:1\n"
    "=========     and Read access at apply+0x20 in file.py:2 [1024 hazards]"
)


def test_every_kind_of_kernel_is_launched() -> None:
    found = launches()
    head_dims = {
        "dense": (64, 96, 128, 192, 256, 384, 512),
        "varlen": (64, 128, 256, 512),
        "decode": (64, 128, 256, 512, 576),
    }
    assert {one[:3] for one in found} == {
        (family, d, kind) for family in ("sm80", "sm90") for kind, dims in head_dims.items() for d in dims
    }
    keywords = {"return_max_logit": "max_logit"}
    for feature in FEATURES:
        name = keywords.get(feature.name, feature.name)
        assert {one.family for one in found if one.feature == name} == {"sm80", "sm90"}, name
    assert len({one.name for one in found}) == len(found)


@pytest.mark.slow
def test_the_launches_need_every_kernel() -> None:
    """Nothing runs: the kernels that the calls would launch are recorded."""
    gpu = CpuGpu(ARCHS["sm_90"], lambda key, operands: None)
    with use_gpu(gpu), claiming_cuda(), launching_operators():
        keys = kernels_of(sanitize_case.needed_kernels(launches(), "cpu"))
    assert {key.kernel for key in keys} == set(KERNELS)
    tiles = {type(key.tile).__name__ for key in keys}
    assert {"FwdTileSm80", "FwdTileSm90", "BwdTileSm80", "BwdTileSm90", "BwdTileSm90Wide"} <= tiles
    assert {key.static.features for key in keys if key.kernel == "fwd_sm90"} >= {(), ("dropout",)}
    plain = {key.tile for key in keys if key.kernel == "fwd_sm90" and not key.static.features}
    for direction in ("fwd", "bwd"):
        for family in ("sm80", "sm90"):
            found = [key.static for key in keys if key.kernel.startswith(f"{direction}_{family}")]
            values = {static.head_dim_v for static in found if static.head_dim == sanitize_case.WIDEST}
            assert values == {None, sanitize_case.WIDEST // 2}, (direction, family)
    assert {(96, 128), (96, 192)} <= {(tile.head_dim, tile.tile_m) for tile in plain}, "for few and for many keys"
    ways = {(key.tile.row_warps, key.tile.speculative_max) for key in keys if key.kernel == "fwd_sm80"}
    assert ways == {(1, False), (1, True), (2, True), (4, False), (4, True)}
    statics = [key.static for key in keys if key.kernel in ("decode", "fwd_split_kv")]
    assert {static.page_lookup for static in statics} == {"", "chunk", "row"}
    assert {static.overlaps_previous for static in statics} == {True, False}, "both families"
    for flag in ("is_fp8", "ragged", "appends", "rotary", "varlen", "heads_first"):
        assert {bool(getattr(static, flag)) for static in statics} == {True, False}, flag
    assert {static.head_dim for static in statics} == {64, 128, 256, 512}
    latent = [key for key in keys if key.kernel.startswith("decode_latent")]
    for kernel in ("decode_latent", "decode_latent_sm90"):
        statics = [key.static for key in latent if key.kernel == kernel]
        assert {static.page_lookup for static in statics} == {"", "chunk", "row"}
        for flag in ("ragged", "appends", "has_query_tables"):
            assert {bool(getattr(static, flag)) for static in statics} == {True, False}, (kernel, flag)
    assert {key.static.is_fp8 for key in latent if key.kernel == "decode_latent"} == {True, False}


def test_decode_launches_have_several_splits() -> None:
    """More keys than one CTA takes, by a fixed number of splits and by the lengths."""
    for feature in ("splits3", "long"):
        call = sanitize_case.DECODE_CALLS[feature]
        shape = DecodeShape(1, 8, 2, 1, max(call.lengths), 128, num_splits=call.num_splits)
        assert DecodeExplanation.of(shape, ARCHS["sm_90"]).splits[0] >= 3
    found = launches(only="*-decode-*")
    calls = sanitize_case.DECODE_CALLS | sanitize_case.LATENT_CALLS
    assert {one.feature for one in found} == {*calls, *sanitize_case.SPLIT_CALLS}
    for family in ("sm80", "sm90"):
        features = {one.feature for one in found if one.family == family}
        assert features >= set(calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch", [*launches(families=("sm80",)), *launches(only="sm90-*-decode-attn*")], ids=lambda launch: launch.name
)
def test_a_launch_is_a_valid_call(launch: Launch) -> None:
    sanitize_case.call(launch, "cpu")


def test_reports_belong_to_launches() -> None:
    first, second = (launch.name for launch in TWO)

    def fake(command: Sequence[str], limit: float) -> tuple[int, str]:
        assert command[:3] == ["compute-sanitizer", "--tool", "racecheck"] and limit <= 60
        lines = [f"LAUNCH {first}", RACE, RACE, f"DONE {first}", f"LAUNCH {second}", f"DONE {second}"]
        return 0, "\n".join([*lines, "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"])

    outcome = sanitize.run_tool("racecheck", TWO, 60.0, fake, clock=lambda: 0.0)
    assert outcome.clean == [second] and list(outcome.reports) == [first] and not outcome.is_clean
    text = sanitize.log([outcome], {"gpu": "NVIDIA H200", "git_commit": "abc", "source_digest": "d"}, "Version 2025.3")
    assert "racecheck: 1 launches clean, 1 with reports, 0 failed, 0 not run" in text
    assert f"{first}: 2 x Error: Race reported between Write access" in text
    assert "produce+0x… in file.py:1 and Read access at apply+0x… in file.py:2" in text
    assert "RACECHECK SUMMARY: 2 hazards" in text and "commit abc, source d" in text


def test_a_launch_that_ends_the_process_is_named_and_the_others_run() -> None:
    first, second = (launch.name for launch in TWO)
    commands = []

    def fake(command: Sequence[str], limit: float) -> tuple[int, str]:
        commands.append(command[command.index("profiling.counters.sanitize_case") + 1 :])
        if first in commands[-1]:
            return 1, f"LAUNCH {first}\nRuntimeError: illegal address\n"
        return 0, f"LAUNCH {second}\nDONE {second}\n========= ERROR SUMMARY: 0 errors\n"

    outcome = sanitize.run_tool("memcheck", TWO, 60.0, fake, clock=lambda: 0.0)
    assert commands == [[first, second], [second]]
    assert outcome.clean == [second] and "illegal address" in outcome.failed[first]


def test_launches_without_time_are_listed() -> None:
    first, second = (launch.name for launch in TWO)
    fake = lambda command, limit: (124, f"LAUNCH {first}\nDONE {first}\nLAUNCH {second}\n")  # noqa: E731
    outcome = sanitize.run_tool("synccheck", TWO, 60.0, fake, clock=lambda: 0.0)
    assert outcome.clean == [first] and outcome.not_run == [second] and not outcome.is_clean
    assert f"not run: {second}" in sanitize.log([outcome], {}, None)


def test_processes_share_the_launches() -> None:
    def fake(command: Sequence[str], limit: float) -> tuple[int, str]:
        (name,) = command[command.index("profiling.counters.sanitize_case") + 1 :]
        report = f"{RACE}\n" if name == TWO[1].name else ""
        return 0, f"LAUNCH {name}\n{report}DONE {name}\n========= ERROR SUMMARY: 0 errors\n"

    outcome = sanitize.run_processes("racecheck", TWO, time.monotonic() + 60, fake, num=3)
    assert outcome.clean == [TWO[0].name] and list(outcome.reports) == [TWO[1].name] and len(outcome.summaries) == 2


def test_command(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(arch, "has_gpu", lambda: True)
    monkeypatch.setattr(sanitize.shutil, "which", lambda program: program)
    monkeypatch.setattr(machine, "facts", lambda: {"gpu": "NVIDIA H200", "git_commit": "abc"})
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sanitize, "precompile_keys", lambda keys, jobs: None)
    monkeypatch.setattr(sanitize, "needed_kernels", lambda chosen: [])

    def fake(command: Sequence[str], limit: float) -> tuple[int, str]:
        done = [line for name in command[6:] for line in (f"LAUNCH {name}", f"DONE {name}")]
        return 0, "\n".join([*done, "========= ERROR SUMMARY: 0 errors"])

    monkeypatch.setattr(sanitize, "run_command", fake)
    assert cli.main(("sanitize", "--only", "sm90-*-dropout", "--tool", "memcheck", "--tool", "racecheck")) == OK
    (log,) = (tmp_path / "results" / "h200").iterdir()
    assert log.name.endswith("-sanitize.txt") and "racecheck: 11 launches clean" in log.read_text()
    assert "synccheck" not in log.read_text() and log.read_text() in capsys.readouterr().out


def test_list_needs_no_gpu(capsys) -> None:
    assert cli.main(("sanitize", "--list", "--only", "*varlen-dropout")) == OK
    said = capsys.readouterr().out
    assert "sm90-d128-varlen-dropout" in said and "8 launches" in said and " s on an H200" in said
    assert launches(only="varlen-dropout") == launches(only="*varlen-dropout*")
    assert cli.main(("sanitize", "--list", "--only", "nothing")) == NOT_MEASURED
    assert "no launch has such a name" in capsys.readouterr().err
