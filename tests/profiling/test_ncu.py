"""`profiling ncu` with a fake `ncu`, which reports the counters of one real launch for every launch.

`data/ncu_raw.csv` is from an H200, with most of its 1238 columns left out.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cute_flash.smem.tile import HOPPER_VARIANTS, VARIANTS
from cute_flash.spec import arch
from layouts import Work
from profiling import __main__ as cli
from profiling.counters import l2_model, ncu, ncu_case, ncu_report, ncu_run, ncu_source
from profiling.counters.expect import expected, work_of
from profiling.counters.ncu_case import Case
from profiling.counters.ncu_metrics import COLLECTED, METRICS, SECTIONS, parse_raw, trim_raw
from profiling.measure import machine
from profiling.measure.shapes import Shape
from profiling.measure.study import FAILED, NOT_MEASURED, OK
from tests.fakes.recording import kernels_of

RAW = Path(__file__).with_name("data") / "ncu_raw.csv"
SHAPE = Shape(2, 8, 8, 2048, 128, False)
PLAIN = Case("fwd-sm80", "plain", SHAPE)


class FakeNcu:
    """Writes a report for a profile, and prints the sample for an import."""

    def __init__(self, fails: str = "", status: int = 1, known: str = "") -> None:
        self.fails, self.status, self.known = fails, status, known
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        self.commands.append(command)
        if "--version" in command:
            return 0, "NVIDIA (R) Nsight Compute\nVersion 2025.3.1.0\n"
        if "--query-metrics" in command:
            return 0, self.known
        if "--import" in command:
            return 0, RAW.read_text() if "raw" in command else "Section: GPU Speed Of Light Throughput\n"
        if self.fails:
            return self.status, self.fails
        Path(command[command.index("--export") + 1] + ".ncu-rep").write_bytes(b"report")
        return 0, "==PROF== Report\n"


@pytest.mark.parametrize("text", [RAW.read_text(), trim_raw(RAW.read_text())], ids=["whole", "trimmed"])
def test_raw_csv(text: str) -> None:
    (profile,) = parse_raw(text)
    assert profile.kernel.startswith(PLAIN.symbol)
    assert profile["sass_ldsm_conflicts"] == 78905344
    assert profile["duration_ns"] == 414048 and profile.capability == "9.0"
    # Hopper has no such counter.
    assert profile["ldgsts_wavefronts"] is None
    assert list(profile.stalls.items())[:2] == [("short_scoreboard", 19.73), ("mio_throttle", 3.04)]
    assert set(profile.metrics) == set(METRICS)
    assert ("device__attribute_clock_rate" in profile.values) == (text == RAW.read_text())


def test_raw_csv_of_values_with_separators_and_without_a_value() -> None:
    names = '"ID","Kernel Name","dram__bytes_read.sum","smsp__inst_executed_op_ldsm.sum"'
    (profile,) = parse_raw(f'==PROF== Connected\n{names}\n"","","byte",""\n"0","k","25,296,384","n/a"\n')
    assert profile["dram_read_bytes"] == 25296384 and profile["ldsm_instructions"] is None


def test_raw_csv_without_a_table() -> None:
    with pytest.raises(ValueError, match="no table"):
        parse_raw("==ERROR== something\n")


def test_the_command_has_no_path_of_this_machine() -> None:
    tool = ncu.Tool(machine.ROOT / "build" / "ncu", run=FakeNcu())
    command = tool.command(PLAIN, tool.report(PLAIN), SECTIONS, COLLECTED)
    options, worker = command[: command.index("-m")], command[command.index("-m") :]
    assert worker == ["-m", "profiling.counters.ncu_case", PLAIN.id, "bf16"]
    found = {name: value for name, value in pairwise(options) if name != "--section"}
    assert found["--kernel-name"] == "regex:^cute_flash_fwd_sm80_" and found["--clock-control"] == "none"
    assert found["--metrics"].split(",") == list(COLLECTED) and options.count("--section") == len(SECTIONS)
    assert found["--export"] == f"build/ncu/{PLAIN.id}"
    assert not any(str(machine.ROOT) in part or part.startswith("/") for part in command)
    # The command names the interpreter without its path.
    status, output = ncu.run_command((options[-1], "-c", "import sys; print(sys.prefix)"))
    assert (status, output.strip()) == (0, sys.prefix)


def test_only_metrics_that_ncu_knows() -> None:
    """`ncu` lists metrics without the suffix that they have in a report."""
    known = "Device NVIDIA H200 (GH100)\ndram__bytes_read  Counter  byte  # of bytes read from DRAM\n"
    tool = ncu.Tool(Path("reports"), run=FakeNcu(known=known))
    assert tool.metrics == ("dram__bytes_read.sum",)


@pytest.mark.parametrize("shape", [SHAPE, Shape(1, 32, 8, 512, 64, True)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_case_is_known_by_its_name(monkeypatch, shape: Shape, dtype: str) -> None:
    case, seen = Case("fwd-sm90", "interleaved", shape, dtype), []
    monkeypatch.setattr(ncu_case, "run", seen.append)
    assert ncu_case.main([case.id, dtype]) == 0 and seen == [case]
    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert ncu_case.dtype_of(f"cute_flash_fwd_sm90_d64_{name}_full_0") == dtype
    with pytest.raises(ValueError, match="notes: not the name"):
        ncu_case.case_of("notes")


def test_choose() -> None:
    cases = ncu.choose(ncu_case.LAYOUTS, (), SHAPE, "bf16")
    assert [case.layout for case in cases] == [*VARIANTS, *HOPPER_VARIANTS, "swizzled", "swizzled"]
    some = ncu.choose(["fwd-sm80", "fwd-sm90"], ["swizzled", "plain"], SHAPE, "bf16")
    assert [(case.kernel, case.layout) for case in some] == [
        ("fwd-sm80", "swizzled"), ("fwd-sm80", "plain"), ("fwd-sm90", "swizzled"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"variants padded: none of these kernels.*fwd-sm90: swizzled, sw"):
        ncu.choose(["fwd-sm90"], ["padded"], SHAPE, "bf16")
    with pytest.raises(ValueError, match="kernel 'fwd-sm70'"):
        ncu.choose(["fwd-sm70"], [], SHAPE, "bf16")


def test_keys_are_all_that_is_launched() -> None:
    spec = arch.by_name("sm_90")
    assert [key.tile.layout for key in PLAIN.keys(spec)] == ["swizzled", "plain"]  # type: ignore[union-attr]
    backward = kernels_of(Case("bwd-sm90", "swizzled", SHAPE).keys(spec))
    names = ["fwd_sm90", "bwd_preprocess", "bwd_sm90", "bwd_postprocess_sm90"]
    assert [key.kernel for key in backward] == names


@pytest.mark.parametrize(
    ("kernel", "shape", "work"),
    [
        # 16 heads of 16 tiles of 128 rows, each against 43 blocks of 48 keys.
        ("fwd-sm80", SHAPE, Work(16 * 16, 16 * 16 * 43)),
        # 128 rows see the first 3 blocks of 48 keys, the other 128 rows all 6.
        ("fwd-sm80", Shape(1, 1, 1, 256, 128, True), Work(2, 3 + 6)),
        # 16 heads of 22 tiles of 96 keys, each against 16 blocks of 128 queries.
        ("bwd-sm80", SHAPE, Work(16 * 22, 16 * 22 * 16)),
        # The first 128 keys are seen by all 5 blocks of 64 queries, the next by 3, the last 64 by 1; 4 heads on 2.
        ("bwd-sm80", Shape(1, 4, 2, 320, 128, True), Work(2 * 3, 4 * (5 + 3 + 1))),
    ],
    ids=["forward", "causal forward", "backward", "causal backward with grouped heads"],
)
def test_expected_work(kernel: str, shape: Shape, work: Work) -> None:
    assert work_of(Case(kernel, "swizzled", shape).plan(arch.by_name("sm_90"))) == work


def test_expected_counts() -> None:
    found = expected(PLAIN, arch.by_name("sm_90"))
    assert found.metrics["ld_conflicts"] == 16 * 16 * 43 * (1792 + 2688 + 2688)
    assert found.metrics["ldgsts_conflicts"] == 0
    assert found.dram_read_bytes == 3 * 16 * 2048 * 128 * 2
    assert set(found.metrics) <= set(METRICS)
    backward = expected(Case("bwd-sm80", "swizzled", SHAPE), arch.by_name("sm_90"))
    assert backward.metrics["ldsm_instructions"] == 16 * 22 * 16 * 1440
    assert backward.metrics["ld_conflicts"] == backward.metrics["st_conflicts"] == 0
    # The sums of dQ are read and written once each: 4 bytes for each element of q.
    tensor = 16 * 2048 * 128 * 2
    assert backward.least_read_bytes == 4 * tensor + 2 * 16 * 2048 * 4 + 2 * tensor
    assert backward.output_bytes == 2 * tensor + 2 * tensor


def bytes_of(kernel: str, shape: Shape, l2_bytes: int) -> tuple[int, int]:
    spec = replace(arch.by_name("sm_90"), l2_bytes=l2_bytes)
    return l2_model.dram_bytes(replace(Case(kernel, "swizzled", shape).plan(arch.by_name("sm_90")), arch=spec))


@pytest.mark.parametrize("kernel", ncu_case.LAYOUTS)
def test_a_large_cache_reads_every_tensor_once_and_writes_nothing(kernel: str) -> None:
    found = expected(Case(kernel, "swizzled", SHAPE), arch.by_name("sm_90"))
    assert bytes_of(kernel, SHAPE, 1 << 40) == (found.least_read_bytes, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ncu_case.LAYOUTS)
def test_outputs_beyond_the_cache_are_written(kernel: str) -> None:
    shape = Shape(**ncu_case.BEYOND_L2, heads_kv=ncu_case.BEYOND_L2["heads"], head_dim=128, causal=False)
    spec = arch.by_name("H200")
    found = expected(Case(kernel, "swizzled", shape), spec)
    assert found.output_bytes > 2 * spec.l2_bytes
    # All outputs are written to HBM, except for at most the size of L2.
    assert found.dram_write_bytes >= found.output_bytes - spec.l2_bytes
    assert found.dram_read_bytes >= found.least_read_bytes


def test_heads_that_two_waves_share_are_read_twice() -> None:
    """D = 256: an L2 group has 104 CTAs, and 132 run at a time."""
    wide = replace(SHAPE, head_dim=256)
    once = expected(Case("bwd-sm90", "swizzled", wide), arch.by_name("sm_90")).least_read_bytes
    assert bytes_of("bwd-sm90", wide, 62914560)[0] > 1.3 * once
    # Q, dO, LSE, delta and the sums of three of four groups are read at most once more.
    assert bytes_of("bwd-sm90", wide, 62914560)[0] < 1.5 * once + 1


SOURCE = """==PROF== Connected
"#","Address","Source","Instructions Executed","L1 Wavefronts Shared","L1 Wavefronts Shared Ideal"
"0","7f00","     MOV R1, c[0x0][0x28] ","64","0","0"
"1","7f10","@!PT LDS RZ, [RZ] ","8","0","0"
"2","7f20","LDS.64 R156, [R23+0x28000]","1,000","2,500","2,000"
"3","7f30","LDS.64 R24, [R23+0x28020]","1000","2500","2000"
"4","7f40","STSM.16.MT88.4 [R2], R4","10","320","40"
"""


def test_wavefronts_by_instruction(on_a_gpu, tmp_path, capsys) -> None:
    class Sources(FakeNcu):
        def __call__(self, command: Sequence[str]) -> tuple[int, str]:
            if "source" in command:
                assert command[command.index("--print-source") + 1] == "sass"
                return 0, SOURCE
            return super().__call__(command)

    fake = Sources()
    assert on_a_gpu(fake, "--kernels", "bwd-sm80", "--by-instruction") == OK
    (profiled,) = [command for command in fake.commands if "--export" in command]
    assert profiled.count("--section") == 1 and "SourceCounters" in profiled and "--metrics" not in profiled
    said = capsys.readouterr().out
    assert re.search(r"\| LDS.64 +\| +2,000 +\| +5,000 +\| +4,000 +\| +1,000 \|", said)
    assert re.search(r"\| STSM.16.MT88.4 +\| +10 +\| +320 +\| +40 +\| +280 \|", said)
    # The record of counters is not touched.
    assert [path.name for path in tmp_path.iterdir()] == [f"{Case('bwd-sm80', 'swizzled', SHAPE).id}.source.tsv"]


def test_a_source_page_without_wavefronts_is_explained() -> None:
    with pytest.raises(ncu.NcuError, match="has no table"):
        ncu_source.parse("nothing\n", "case")
    with pytest.raises(ncu.NcuError, match="without wavefronts of shared memory"):
        ncu_source.parse('"#","Address","Source","Instructions Executed"\n', "case")


def test_beyond_l2(on_a_gpu, tmp_path) -> None:
    assert on_a_gpu(FakeNcu(), "--beyond-l2", "--kernels", "fwd-sm80") == OK
    (case,) = json.loads((tmp_path / ncu_run.RECORD).read_text())["cases"].values()
    assert case["layout"] == "swizzled" and ncu_case.is_beyond_l2(case)


def test_table_and_record(tmp_path) -> None:
    tool = ncu.Tool(tmp_path / "reports", run=FakeNcu())
    finding = ncu_report.Finding(PLAIN, expected(PLAIN, arch.by_name("sm_90")), tool.profile(PLAIN))
    (table,) = ncu_report.tables([finding])
    rows = {row[0]: row[1] for row in table.rows}
    assert rows["ldmatrix conflicts (by instruction)"] == "78,905,344 (78,905,344)"
    assert rows["store wavefronts"] == "524,405 (524,288)"
    assert rows["time, us"].startswith("414.0 (") and rows["TFLOP/s"] == "83"
    assert rows["stall 1"] == "short_scoreboard 19.73" and rows["XU pipe, %"] == "4.5"
    suffixes = (".csv", ".ncu-rep", ".txt")
    assert sorted(path.name for path in tool.folder.iterdir()) == [f"{PLAIN.id}{end}" for end in suffixes]
    data = json.loads(json.dumps(ncu_report.record([finding], {}, {"gpu": "fake"}, tool.version)))
    assert data["ncu"] == "Version 2025.3.1.0"
    assert data["cases"][PLAIN.id]["predicted_shared"]["ldmatrix"]["conflicts"] == 78905344


@pytest.mark.parametrize(
    ("said", "status", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user", 1, "--cap-add=SYS_ADMIN"),
        ("Traceback\nValueError: bad shape", 1, "status 1:\nTraceback\nValueError: bad shape"),
        ("==WARNING== No kernels were profiled.", 0, "wrote no report"),
    ],
)
def test_failures_are_explained(tmp_path, said: str, status: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ncu.Tool(tmp_path, run=FakeNcu(said, status)).profile(PLAIN)


def test_no_ncu(tmp_path) -> None:
    with pytest.raises(ncu.NcuError, match=r"no-such-ncu: no such program.*--ncu"):
        ncu.Tool(tmp_path, "no-such-ncu").check()


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """`on_a_gpu(ncu, *arguments)`: exit status of `profiling ncu` if all kernels are compiled."""
    monkeypatch.setattr(arch, "has_gpu", lambda: True)
    monkeypatch.setattr(arch, "detect", lambda index: arch.by_name("sm_90"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ncu_run, "precompile_keys", lambda keys, jobs: len(keys))
    monkeypatch.setattr(machine, "facts", lambda: {"gpu": "fake"})
    monkeypatch.setattr(ncu.Tool, "check", lambda self: None)

    made = ncu.Tool

    def run(fake: FakeNcu, *arguments: str) -> int:
        monkeypatch.setattr(ncu_run, "Tool", lambda folder, program: made(folder, program, fake))
        return cli.main(("ncu", "--out", str(tmp_path), *arguments))

    return run


def test_the_record_is_made_from_the_exports(on_a_gpu, tmp_path, capsys) -> None:
    assert on_a_gpu(FakeNcu(), "--kernels", "fwd-sm80") == OK
    printed = capsys.readouterr()
    assert "| load conflicts " in printed.out and "[1/3] fwd-sm80-swizzled" in printed.err
    path = tmp_path / ncu_run.RECORD
    record = json.loads(path.read_text())
    assert len(record["cases"]) == len(VARIANTS) and record["machine"] == {"gpu": "fake"}
    for report in tmp_path.glob("*.ncu-rep"):
        report.unlink()
    assert cli.main(("ncu", "--from-exports", "--out", str(tmp_path))) == OK
    assert json.loads(path.read_text()) == record
    assert "| ldmatrix conflicts (by instruction) " in capsys.readouterr().out


def test_no_exports(tmp_path, capsys) -> None:
    assert cli.main(("ncu", "--from-exports", "--out", str(tmp_path))) == NOT_MEASURED
    assert "no .csv of a profiled case" in capsys.readouterr().err


@pytest.mark.parametrize(("digest", "num"), [("a", 4), ("b", 3)])
def test_pieces_of_one_run_share_a_record(on_a_gpu, monkeypatch, tmp_path, digest: str, num: int) -> None:
    facts = {"gpu": "H200", "driver": "1", "source_digest": "a"}
    monkeypatch.setattr(machine, "facts", lambda: facts)
    assert on_a_gpu(FakeNcu(), "--kernels", "fwd-sm80", "--variants", "plain") == OK
    monkeypatch.setattr(machine, "facts", lambda: {**facts, "source_digest": digest})
    assert on_a_gpu(FakeNcu(), "--kernels", "fwd-sm80", "--head-dim", "96") == OK
    assert len(json.loads((tmp_path / ncu_run.RECORD).read_text())["cases"]) == num


def test_an_interrupted_run_keeps_its_results(on_a_gpu, tmp_path) -> None:
    class Killed(FakeNcu):
        def __call__(self, command: Sequence[str]) -> tuple[int, str]:
            if "--export" in command and "padded" in command[command.index("--export") + 1]:
                raise KeyboardInterrupt
            return super().__call__(command)

    with pytest.raises(KeyboardInterrupt):
        on_a_gpu(Killed(), "--kernels", "fwd-sm80")
    (case,) = json.loads((tmp_path / ncu_run.RECORD).read_text())["cases"].values()
    assert case["layout"] == "swizzled" and case["measured"]["duration_ns"] == 414048


def test_main_goes_on_after_a_failure(on_a_gpu, tmp_path, capsys) -> None:
    assert on_a_gpu(FakeNcu("out of memory"), "--kernels", "bwd-sm90,bwd-sm80") == FAILED
    assert capsys.readouterr().out.count("out of memory") == 2


def test_main_ends_without_permission(on_a_gpu, capsys) -> None:
    assert on_a_gpu(FakeNcu("ERR_NVGPUCTRPERM")) == NOT_MEASURED
    assert "--cap-add=SYS_ADMIN" in capsys.readouterr().err


def test_main_predicts_without_a_gpu(capsys) -> None:
    arguments = ("ncu", "--predict-only", "--arch", "sm_80", "--kernels", "fwd-sm80", "--head-dim", "96")
    assert cli.main(arguments) == OK
    assert "| - (22,069,248) |" in capsys.readouterr().out
