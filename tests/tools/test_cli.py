"""`cute-flash` through its entry point: output and exit status."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_flash
from cute_flash.jit import kernels, pack, resources
from cute_flash.jit.digest import build_facts, digest
from cute_flash.jit.disk import DiskCache
from cute_flash.jit.pack import Manifest
from cute_flash.planning.plan import CompileKey, plan_backward, plan_forward
from cute_flash.spec import arch
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.features import FEATURES, MODS
from cute_flash.spec.problem import Problem
from cute_flash.tools import cli, demo, explain, precompile, roofline, text
from cute_flash.tools.cli import main
from cute_flash.tools.studies import STUDIES
from tests.fakes.recording import backward_keys, forward_keys

ROOT = Path(__file__).parents[2]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def fake_resources(spill_bytes: int = 0, serialised: tuple[str, ...] = ()):
    """A replacement of `kernel_resources` without a compilation, and the keys that it was called with."""
    keys: list[CompileKey] = []

    def kernel_resources(key: CompileKey) -> resources.Resources:
        keys.append(key)
        is_hopper = key.kernel == "fwd_sm90"
        mix = Counter({"HGMMA": 48, "UTMALDG": 7} if is_hopper else {"HMMA": 320, "MUFU": 64})
        ptx = "setmaxnreg.dec.sync.aligned.u32 24;setmaxnreg.inc.sync.aligned.u32 240;" if is_hopper else ""
        sizes = (168, 0, spill_bytes, 0, key.tile.smem_bytes)
        return resources.Resources("symbol", key.target, *sizes, serialised, mix, ptx=ptx)

    return kernel_resources, keys


def exit_status(argv: list[str]) -> object:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code


def test_installed_command() -> None:
    command = Path(sys.executable).with_name("cute-flash")
    found = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert found.stdout == f"cute-flash {cute_flash.__version__}\n"


@pytest.mark.parametrize("argv", ["--help", "--version", "doctor --help", "precompile --help", "explain --help"])
def test_help_and_version_do_not_import_torch(argv: str) -> None:
    """The installed script, and `python -m cute_flash`."""
    script = Path(sys.executable).with_name("cute-flash")
    for command in ([str(script)], ["-m", "cute_flash"]):
        found = subprocess.run(
            [sys.executable, "-X", "importtime", *command, *argv.split()],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd="/",
        )
        imported = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}
        assert "cute_flash.tools.cli" in imported
        assert not {"torch", "cutlass", "tvm_ffi"} & imported
        assert "cute-flash" in found.stdout


@pytest.mark.parametrize(
    "command", ["", "demo", "doctor", "selftest", "explain", *STUDIES, "inspect", "precompile", "cache"]
)
def test_examples_of_the_help_can_be_typed(command: str, capsys: pytest.CaptureFixture) -> None:
    assert exit_status([*command.split(), "--help"]) == 0
    _, found, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert found
    for line in examples.splitlines():
        program, *argv = shlex.split(line, comments=True)
        assert program == "cute-flash" and argv[0].startswith(command)
        if "--help" not in argv:
            cli._parser(argv).parse_args(argv)


def installed(argv: str, **env: str) -> subprocess.Popen[str]:
    """Start the installed command."""
    command = [Path(sys.executable).with_name("cute-flash"), *argv.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.processes
@pytest.mark.parametrize("argv", ["explain 1,2,64,64 --gpu A100", "doctor"])
def test_no_warning_about_numpy_precedes_the_output(argv: str, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    process = installed(argv, PYTHONPATH=f"{tmp_path}:{ROOT}", CUTE_FLASH_CACHE_DIR=str(tmp_path / "cache"))
    out, error = process.communicate()
    assert out and not error


@pytest.mark.processes
def test_a_reader_may_close_the_output() -> None:
    """As `cute-flash explain ... | head` does."""
    process = installed("explain 1,2,64,64 --gpu A100")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


@pytest.mark.parametrize("module", ["cutlass", "tvm_ffi"])
@pytest.mark.parametrize("command", ["inspect", "precompile --arch sm_80", "demo"])
def test_a_missing_package_is_one_line(
    command: str, module: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(demo, "PROBLEM", replace(demo.PROBLEM, seqlen_q=256, seqlen_k=256))
    is_cpu_demo = command == "demo" and not torch.cuda.is_available()
    assert main(command.split()) == (0 if is_cpu_demo else 1)
    package = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}[module]
    out, error = capsys.readouterr()
    lines = [line for line in f"{out}{error}".splitlines() if package in line]
    remedy = f"{package} is not installed: pip install '{package}"
    if is_cpu_demo:
        assert "\nCPU path: the result is right\n" in out and len(lines) == 1 and remedy in lines[0]
    else:
        assert not out and error.startswith(f"cute-flash: {remedy}") and error.count("\n") == 1


def test_no_command_and_unknown_command_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert exit_status([]) == 2
    assert exit_status(["flash"]) == 2
    assert "demo" in capsys.readouterr().err


# explain


def explained(argv: str, capsys: pytest.CaptureFixture) -> tuple[dict[str, Any], str]:
    """What `cute-flash explain` says of one shape: as JSON, and as text."""
    outs = []
    for extra in (["--json"], []):
        assert main(["explain", *argv.split(), *extra]) == 0
        outs.append(capsys.readouterr().out)
    (found,) = json.loads(outs[0])
    return found, outs[1]


CAUSAL = Band(None, 0)
# Arguments -> the problem and the GPU.
EXPLAINED: dict[str, tuple[Problem, arch.ArchSpec]] = {
    "2,16,4096,128 --kv-heads 4 --seqlen-k 8192 --window 1000 0 --gpu A100": (
        Problem(2, 16, 4, 4096, 8192, 128, "bfloat16", Band(1000, 0)),
        arch.SM_80,
    ),
    "2,16,4096,128 --causal --gpu H200": (Problem(2, 16, 16, 4096, 4096, 128, "bfloat16", CAUSAL), arch.H200),
    "3,1,1024,64 --causal --gpu sm_90 --dtype fp16": (Problem(3, 1, 1, 1024, 1024, 64, "float16", CAUSAL), arch.SM_90),
    "2,16,4096,128 --causal --attention-chunk 3000 --gpu H200": (
        Problem(2, 16, 16, 4096, 4096, 128, "bfloat16", Band(None, 0, 3000)),
        arch.H200,
    ),
    "2,16,4096,128 --dtype fp32 --gpu A100": (Problem(2, 16, 16, 4096, 4096, 128, "float32"), arch.SM_80),
    "2,16,4096,128 --dtype fp32 --gpu H200": (Problem(2, 16, 16, 4096, 4096, 128, "float32"), arch.H200),
    "2,16,4096,192 --value-dim 128 --gpu A100": (Problem(2, 16, 16, 4096, 4096, 192, head_dim_v=128), arch.SM_80),
    "2,16,4096,192 --value-dim 128 --gpu H200": (Problem(2, 16, 16, 4096, 4096, 192, head_dim_v=128), arch.H200),
    "2,16,4096,192 --value-dim 192 --gpu H200": (Problem(2, 16, 16, 4096, 4096, 192), arch.H200),
}


@pytest.mark.parametrize("argv", EXPLAINED)
def test_explain_gives_the_numbers_of_plan_and_roofline(argv: str, capsys: pytest.CaptureFixture) -> None:
    problem, gpu = EXPLAINED[argv]
    plan = plan_forward(problem, gpu)
    tile, bound, occupancy = plan.tile, roofline.roofline(problem, gpu), roofline.Occupancy(plan)
    found, shown = explained(argv, capsys)
    expected = {
        "problem.band": {"left": problem.band.left, "right": problem.band.right, "chunk": problem.band.chunk},
        "arch": gpu.name,
        "kernel": plan.main.kernel,
        "target": plan.main.target,
        "tiles": plan.sizes["num_tiles"],
        "blocks": plan.sizes["num_ctas"],
        "tile.tile_m": tile.tile_m,
        "tile.tile_n": tile.tile_n,
        "smem_bytes": tile.smem_bytes,
        "smem_limit_bytes": gpu.smem_per_cta,
        "flops": roofline.flops(problem),
        "flops_nominal": roofline.flops_nominal(problem),
        "exps": roofline.exp_count(problem),
        "least_bytes": roofline.hbm_bytes(problem),
        "unfused_bytes": roofline.standard_bytes(problem),
        "reread_bytes": roofline.fa_bytes(problem, tile.tile_m),
        "max_rescales": roofline.max_rescales(problem, tile.tile_m, tile.tile_n),
        "intensity": bound.intensity,
        "ridge": bound.ridge,
        "roofline_bound": bound.bound,
        "roofline_seconds": bound.seconds,
        "busy_sms": occupancy.busy_sms,
        "used_rows": occupancy.used_rows,
        "seconds": occupancy.seconds,
        "bound": occupancy.bound,
    }
    if problem.dtype == "float32":
        expected |= {"mmas_per_product": 3, "tile.pieces": 2, "piece_bytes": roofline.piece_bytes(problem)}
        assert "two fp16 pieces of each element" in shown and "3 MMAs per product" in shown
    else:
        expected["papers_sram_bytes"] = roofline.sram_bytes(tile.tile_m, tile.tile_n, tile.head_dim, 2)
    flat = {**found, **{f"{part}.{name}": x for part in ("problem", "tile") for name, x in found[part].items()}}
    assert {name: flat[name] for name in expected} == {
        name: pytest.approx(x) if isinstance(x, float) else x for name, x in expected.items()
    }
    for line in [*plan.lines(), *bound.lines(), *occupancy.lines()]:
        assert line.split(None, 1)[1] in shown
    labels = [line[: text.LABEL_WIDTH].strip() for line in shown.splitlines()]
    assert {"re-reads", "rescales", "SRAM"} < set(labels) and "" not in labels
    width = f"D={problem.head_dim}" + f"/{problem.head_dim_v}" * (problem.head_dim_v is not None)
    assert f"{width} " in shown


def test_explain_takes_several_shapes(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "1,1,1024,64", "3,1,1024,64", "--gpu", "sm_90"]) == 0
    first, second = capsys.readouterr().out.strip().split("\n\n")
    assert "B=1 H=1" in first and "B=3 H=1" in second


DECODING = "8,32,1,128 --kv-heads 8 --cache-len 8192 --page-size 16 --gpu H100"


LATENT = "8,128,1,576 --value-dim 512 --cache-len 8192 --gpu H100"


@pytest.mark.parametrize("argv", ["2,16,4096,128 --dtype fp32 --gpu A100", DECODING, LATENT])
def test_explain_in_short_and_with_a_legend(argv: str, capsys: pytest.CaptureFixture) -> None:
    outs = []
    for option in ("", "--short", "--legend"):
        assert main(["explain", *argv.split(), *option.split()]) == 0
        outs.append(capsys.readouterr().out)
    plain, short = outs[0].splitlines(), outs[1].splitlines()
    explanation, _, rest = outs[2].partition("\n\n")
    legend = rest.splitlines()
    # Every line is explained, in order.
    labels = [[line[: text.LABEL_WIDTH].strip() for line in lines] for lines in (plain, short, legend)]
    assert set(short) < set(plain) and {"kernel", "tile", "traffic", "time"} <= set(labels[1]) and len(short) <= 8
    assert explanation.splitlines() == plain and labels[2] == labels[0]
    assert all(len(line) <= 120 for line in legend)


FEW_QUERIES = "1,64,1,128 --kv-heads 8 --seqlen-k 32768 --gpu H100"


def test_explain_of_few_queries_tells_that_keys_are_split(capsys: pytest.CaptureFixture) -> None:
    found, out = explained(FEW_QUERIES, capsys)
    assert found["kernel"] == "fwd_split_kv" and found["splits_keys"] and found["problem"]["is_attn"]
    assert found["busy_blocks"] > 100 and found["splits"][0] > 10
    assert found["least_bytes"] == roofline.hbm_bytes(Problem(1, 64, 8, 1, 32768, 128))
    assert found["seconds"] == pytest.approx(40e-6, rel=0.01) and found["bound"] == "memory"
    assert "attn, few queries: the keys are split among CTAs" in out and "at least 40.07 us, by memory" in out
    # Enough tiles for all SMs, or few keys: not split.
    for other in ("64,64,1,128 --kv-heads 8 --seqlen-k 4096", "1,64,1,128 --kv-heads 8 --seqlen-k 256"):
        assert "split" not in explained(f"{other} --gpu H100", capsys)[1]


def test_explain_of_few_queries_counts_the_sms_that_have_a_cta(capsys: pytest.CaptureFixture) -> None:
    """A family that the caller chooses does not split keys."""
    with use_kernels("sm90"):
        found, out = explained(FEW_QUERIES, capsys)
    assert (found["blocks"], found["busy_sms"], found["used_rows"]) == (8, 8, 64 / (8 * 128))
    # With pack_gqa, every tile reads K and V of its head once.
    assert found["reread_bytes"] == found["least_bytes"]
    assert found["roofline_seconds"] == pytest.approx(40e-6, rel=0.01) and found["roofline_bound"] == "memory"
    # Each of the 8 SMs computes 128 rows against 32768 keys.
    assert found["seconds"] == pytest.approx(4 * 128 * 128 * 32768 / (989e12 / 132)) and found["bound"] == "tensor"
    assert "8 of 132 SMs have a CTA, 6% of the tiles' rows are queries" in out and "at least 286.62 us" in out


def test_explain_knows_parts_of_one_architecture(capsys: pytest.CaptureFixture) -> None:
    ridges = {}
    for name in ("A100", "h100", "H200", "A10", "L40S"):
        assert main(["explain", "2,16,4096,128", "--gpu", name, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        ridges[found["gpu"]] = round(found["ridge"])
    assert ridges == {"A100": 156, "H100": 295, "H200": 206, "A10": 208, "L40S": 419}


@pytest.mark.parametrize(
    "shape",
    ["", "128", "1024,64", "2,16,4096", "1,2,3,4,5", "2,16,4096,", "2,16,4k,128", "0,16,4096,128", "2;16;4096;128"],
)
def test_explain_refuses_what_is_no_shape(shape: str, capsys: pytest.CaptureFixture) -> None:
    assert exit_status(["explain", shape]) == 2
    assert f"{shape!r} is not a shape: write B,H,S,D, four positive numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("explain 2,16,4096,130", "the nearest is 136"),
        ("explain 2,16,4096,128 --kv-heads 3", "must be a multiple"),
        ("explain 2,16,4096,128 --gpu V100", "use one of sm_80"),
        ("explain 2,16,4096,256 --dtype fp32 --gpu A100", "head_dim=256 of float32 on cuda: at most 128"),
        ("inspect --head-dim 520", "to 512; use torch's SDPA"),
        ("explain 1,2,64,64 --cp 2 --short", "--short and --legend with --cp"),
        ("precompile --arch sm_70", "sm_80"),
        ("precompile --arch sm_80 --head-dims 64,130", "the nearest is 136"),
    ],
)
def test_refusals_of_the_library_exit_2(argv: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(argv.split()) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("cute-flash: ") and message in error and "Traceback" not in error


@pytest.mark.parametrize(
    "argv",
    [
        "explain 2,16,4096,128 --window 3 -1",
        "explain 2,16,4096,128 --window 3 four",
        "explain 2,16,4096,128 --dtype fp8",
        "explain 2,16,4096,128 --short --json",
        "precompile --masks full,diagonal",
        "precompile --head-dims 64,,128",
        "precompile --passes forwards",
        "precompile --features softcap+score_mod",
        "precompile --features softcap,,alibi",
        "precompile --batches ragged",
        "inspect --head-dim 0",
    ],
)
def test_malformed_options_exit_2(argv: str) -> None:
    assert exit_status(argv.split()) == 2


# inspect


@pytest.mark.parametrize(("spilled", "serialised", "status"), [(0, (), 0), (24, (), 1), (0, ("C7510",), 1)])
def test_inspect_fails_on_spills_and_serialised_wgmma(
    spilled: int,
    serialised: tuple[str, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    kernel_resources, keys = fake_resources(spilled, serialised)
    monkeypatch.setattr(resources, "kernel_resources", kernel_resources)
    argv = ["inspect", "--head-dim", "96", "--window", "5", "none", "--arch", "sm_86", "--dtype", "fp16"]
    assert main(argv) == status
    static = keys[0].static
    assert (static.dtype, static.head_dim, static.has_left, static.has_right) == ("float16", 96, True, False)
    assert keys[0].target == "sm_86"
    out = capsys.readouterr().out
    assert "168 a thread" in out and f"{spilled} bytes spilled" in out and "HMMA 320" in out
    assert ("C7510" in out) == bool(serialised)


def test_inspect_knows_the_hopper_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    kernel_resources, keys = fake_resources()
    monkeypatch.setattr(resources, "kernel_resources", kernel_resources)
    assert main(["inspect", "--head-dim", "128", "--causal", "--arch", "sm_90"]) == 0
    out, error = capsys.readouterr()
    assert (keys[0].kernel, keys[0].target) == ("fwd_sm90", "sm_90a")
    for part in ("fwd_sm90", "(sm_90a)", "168 at launch, then 24 or 240 a thread", "HGMMA 48, UTMALDG 7"):
        assert part in out
    assert str(keys[0].tile) in out and "HMMA 320" not in out
    assert "compiling fwd_sm90 for sm_90a" in error
    # The mma.sync kernel runs on Hopper too.
    with use_kernels("sm80"):
        assert main(["inspect", "--head-dim", "128", "--arch", "sm_90"]) == 0
    assert (keys[1].kernel, keys[1].target) == ("fwd_sm80", "sm_90")
    assert "HMMA 320" in capsys.readouterr().out


def test_inspect_finds_the_tile_of_a_length(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    kernel_resources, keys = fake_resources()
    monkeypatch.setattr(resources, "kernel_resources", kernel_resources)
    for seqlen_k in ("100", "1000000"):
        assert main(["inspect", "--head-dim", "256", "--arch", "sm_90", "--seqlen-k", seqlen_k]) == 0
    assert main(["inspect", "--head-dim", "256", "--arch", "sm_90"]) == 0
    problems = [Problem(1, 1, 1, 1000, seqlen_k, 256) for seqlen_k in (100, 1000000, 1000000)]
    assert [key.tile for key in keys] == [plan_forward(problem, arch.SM_90).tile for problem in problems]


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "target", "mma"),
    [("sm_80", "sm_80", "HMMA"), pytest.param("sm_90", "sm_90a", "HGMMA", marks=pytest.mark.kernels("fwd_sm90"))],
)
def test_inspect_writes_the_code_it_counted(
    name: str, target: str, mma: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sass, ptx = tmp_path / "kernel.sass", tmp_path / "kernel.ptx"
    argv = f"inspect --head-dim 64 --arch {name} --sass {sass} --ptx {ptx}"
    assert main(argv.split()) == 0
    out = capsys.readouterr().out
    counted = Counter(resources._INSTRUCTION.findall(sass.read_text()))[mma]
    assert counted > 0 and f" {mma} {counted}," in out
    assert f".target {target}\n" in ptx.read_text()


# precompile and cache


@pytest.mark.compiles
def test_precompile_fills_the_cache_once(fresh_cache: Path, capsys: pytest.CaptureFixture) -> None:
    argv = "precompile --arch sm_80 --head-dims 64 --dtypes bf16 --masks full --passes forward".split()
    assert main(argv) == 0
    out, error = capsys.readouterr()
    assert "1 kernel(s) compiled, 0 already there" in out and "[1/1]" in error
    plan = plan_forward(Problem(3, 2, 2, 77, 99, 64), arch.SM_80)
    # The kernel of every problem of this head dim, dtype and mask.
    assert [path.stem for path in DiskCache(fresh_cache).files()] == [digest(plan.main)]
    assert main(argv) == 0
    assert "0 kernel(s) compiled, 1 already there" in capsys.readouterr().out
    assert main(["cache"]) == 0 and "1 kernel(s)" in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0 and "deleted" in capsys.readouterr().out
    assert main(["cache"]) == 0 and "0 kernel(s)" in capsys.readouterr().out


@pytest.mark.compiles
def test_precompile_in_several_processes(fresh_cache: Path, capsys: pytest.CaptureFixture) -> None:
    argv = "precompile --arch sm_86 --head-dims 32 --dtypes bf16,fp16 --masks full --passes forward --jobs 2".split()
    assert main(argv) == 0
    assert "2 kernel(s) compiled, 0 already there" in capsys.readouterr().out
    problems = [Problem(1, 1, 1, 5, 5, 32, dtype) for dtype in ("bfloat16", "float16")]
    keys = [plan_forward(problem, arch.SM_86).main for problem in problems]
    assert {path.stem for path in DiskCache(fresh_cache).files()} == set(map(digest, keys))


def precompiled(argv: str, monkeypatch: pytest.MonkeyPatch) -> list[CompileKey]:
    """The kernels that `cute-flash precompile` would compile."""
    keys = []

    def precompile(key: CompileKey, cache: DiskCache | None) -> bool:
        keys.append(key)
        return True

    monkeypatch.setattr(kernels, "precompile", precompile)
    assert main(["precompile", *argv.split()]) == 0
    return keys


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_precompile_leaves_nothing_to_compile(
    name: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    keys = precompiled(f"--arch {name} --head-dims 64,128,256 --passes forward", monkeypatch)
    out, error = capsys.readouterr()
    target = {"sm_80": "sm_80", "sm_90": "sm_90a"}[name]
    assert f"{len(keys)} kernel(s) compiled" in out and f"{len(keys)} kernel(s) for {target}," in error
    assert len(set(keys)) == len(keys) and {key.target for key in keys} == {target}
    # Problems of these head dims, of any dtype, mask, lengths and heads, need exactly these kernels.
    bands = (Band(), Band(None, 0), Band(100, 3), Band(5000, 3))
    lengths = list(itertools.product((1, 100, 5000), (1, 1000, 1024, 1025, 2048, 2049, 1 << 20)))
    needed = {
        plan_forward(Problem(1, heads, 1, *length, dim, dtype, band), arch.ARCHS[name], can_pack_gqa=can_pack_gqa).main
        for dim, dtype, band in itertools.product((64, 128, 256), ("bfloat16", "float16"), bands)
        for length, heads, can_pack_gqa in itertools.product(lengths, (1, 8), (False, True))
    }
    assert needed == set(keys)
    assert len(keys) == 18 if name == "sm_80" else len(keys) > 18


def test_precompile_takes_a_head_dim_of_v(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = "--arch sm_80 --head-dims 64,192/128 --dtypes bf16 --masks full --passes forward"
    problems = Problem(1, 1, 1, 5, 5, 64), Problem(1, 1, 1, 5, 5, 192, head_dim_v=128)
    assert precompiled(argv, monkeypatch) == [plan_forward(problem, arch.SM_80).main for problem in problems]


def test_cache_says_what_a_pack_has(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert main(["cache"]) == 0
    assert "0 kernel(s)" in (out := capsys.readouterr().out) and "no pack of kernels is installed" in out
    manifest = Manifest("1.2", build_facts(), {"sm_80": {"a": "", "b": ""}})
    monkeypatch.setattr(pack, "installed_pack", lambda: pack.Pack(Path(), manifest))
    assert main(["cache"]) == 0 and "cute-flash-kernels 1.2: 2 kernel(s) for sm_80" in capsys.readouterr().out
    other = replace(manifest, facts={**build_facts(), "flavour": "cu11"})
    monkeypatch.setattr(pack, "installed_pack", lambda: pack.Pack(Path(), other))
    assert main(["cache"]) == 0
    assert "not used, because it was built with the CUDA flavour of the DSL cu11" in capsys.readouterr().out


def test_precompile_covers_backward_tiles_for_few_keys(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mma.sync backward has one tile for up to 512 keys at D = 128 on Hopper, and one for more."""
    with use_kernels("sm80"):
        keys = precompiled("--arch sm_90 --head-dims 128 --dtypes bf16 --masks full --passes backward", monkeypatch)
    found = {one for key in keys for one in key.keys if one.kernel == "bwd_sm80"}
    problems = [Problem(1, 1, 1, 100, keys, 128) for keys in (100, 512, 513, 1 << 20)]
    assert found == {plan_backward(problem, arch.ARCHS["sm_90"], family="sm80").main for problem in problems}
    assert len(found) == 2


def calls(head_dim: int, varlen: bool) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], AttentionArgs]]:
    """Calls with features and masks, dense or varlen, and with `seqused_k`."""
    shape = (300, 2, head_dim) if varlen else (2, 2, 300, head_dim)
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3))
    offsets, used = torch.tensor([0, 100, 300], dtype=torch.int32), torch.tensor([90, 100], dtype=torch.int32)
    slopes = torch.ones(2)
    features: list[dict[str, Any]] = [
        {},
        {"softcap": 30.0},
        {"alibi": slopes, "dropout": 0.1, "rng": torch.zeros(2, dtype=torch.int64)},
        {"sinks": slopes, "return_max_logit": True},
    ]
    lengths: list[dict[str, Any]] = [{}]
    if varlen:
        lengths = [{"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "seqused_k": x} for x in (None, used)]
    for named, given, right in itertools.product(features, lengths, (None, 0)):
        yield (q, k, v), AttentionArgs(scale=0.1, window_right=right, **named, **given)


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_precompile_covers_gradients_features_and_varlen(
    name: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    features = "--features plain,softcap,dropout+alibi,sinks+return_max_logit"
    argv = f"--arch {name} --head-dims 64,128 --dtypes bf16 --masks full,causal {features} --batches dense,varlen"
    keys = precompiled(f"{argv} --deterministic", monkeypatch)
    error = capsys.readouterr().err
    assert f"[{len(keys)}/{len(keys)}]" in error and len(set(keys)) == len(keys)
    for part in ("bwd_", "varlen softcap", "alibi dropout", "varlen_scheduler_fwd seqused_k", "deterministic"):
        assert part in error
    needed = set()
    for head_dim, varlen in itertools.product((64, 128), (False, True)):
        for inputs, args in calls(head_dim, varlen):
            needed |= {*forward_keys(*inputs, args, arch.ARCHS[name])}
            for deterministic, has_dlse in itertools.product((False, True), (False, True)):
                own = args._replace(deterministic=deterministic)
                needed |= {*backward_keys(*inputs, own, arch.ARCHS[name], has_dlse)}
    assert needed <= set(keys)


def test_options_name_what_planning_knows() -> None:
    """The parser has its own lists of choices, because it must not import planning."""
    assert list(cli.MASKS) == list(precompile.BANDS)
    assert list(cli.FEATURES) == [feature.name for feature in FEATURES if feature.name not in MODS]


def test_precompile_covers_gradients_by_default(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    kernels = {one.kernel for key in precompiled("--arch sm_90", monkeypatch) for one in key.keys}
    assert kernels == {"fwd_sm90", "bwd_preprocess", "bwd_sm90", "bwd_postprocess_sm90"}


@needs_no_gpu
def test_precompile_without_gpu_wants_an_architecture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("CUTE_FLASH_ARCH", raising=False)
    assert main(["precompile"]) == 2
    assert "--arch" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::cute_flash.jit.disk.CacheWarning")
def test_precompile_into_a_folder_that_is_not_kept_fails(fresh_cache: Path, capsys: pytest.CaptureFixture) -> None:
    fresh_cache.write_text("a file in its place")
    assert main(["precompile", "--arch", "sm_80"]) == 1
    assert "doctor" in capsys.readouterr().err


# demo


@needs_no_gpu
def test_demo_without_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(demo, "PROBLEM", replace(demo.PROBLEM, seqlen_q=512, seqlen_k=512))
    cached_resources, keys = fake_resources()
    monkeypatch.setattr(resources, "cached_resources", cached_resources)
    assert main(["demo"]) == 0
    out, error = capsys.readouterr()
    assert out.startswith("CPU path: torch sees no CUDA GPU")
    _, found, next_steps = out.partition("\nCPU path: the result is right\n\nNext:\n")
    assert found
    paths, commands = (
        re.findall(r"(?:docs|examples)/[\w.-]+", next_steps),
        re.findall(r"cute-flash (.*?)  ", next_steps),
    )
    assert all((ROOT / path).exists() for path in paths) and len(paths) == 3
    for argv in map(str.split, commands):
        cli._parser(argv).parse_args(argv)
    assert len(commands) == 3
    assert [(key.target, key.static.head_dim) for key in keys] == [("sm_90a", 128)]
    assert "D=128 for sm_90a: 168 at launch, then 24 or 240 registers a thread, 0 bytes spilled, 48 HGMMA," in out
    for gpu in (arch.SM_80, arch.SM_90):
        for line in explain.Explanation.of(demo.PROBLEM, gpu).lines():
            assert line in out
    assert error.count("took") == 2


@needs_no_gpu
def test_demo_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(demo, "PROBLEM", replace(demo.PROBLEM, seqlen_q=256, seqlen_k=256))
    monkeypatch.setattr(resources, "cached_resources", fake_resources()[0])
    # Every row gets the result of the previous row.
    monkeypatch.setattr(demo, "attn", lambda q, k, v, causal: cute_flash.attn(q, k, v, causal=causal).roll(1, dims=2))
    assert main(["demo"]) == 1
    assert capsys.readouterr().out.endswith("CPU path: the result is WRONG\n")


def test_a_nan_or_a_bad_mean_is_wrong() -> None:
    right = demo.Error(1e-2, 1e-4)
    for bad in (demo.Error(float("nan"), float("nan")), demo.Error(1e-2, 3e-4), demo.Error(3e-2, 1e-4)):
        assert demo.Comparison(right, right, right, right).is_right
        assert not demo.Comparison(bad, right, right, right).is_right
