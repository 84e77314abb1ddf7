"""`cute-flash` through its entry point: what it prints, and the status it exits with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import cute_flash
from cute_flash import arch, demo, explain, resources, roofline
from cute_flash import compile as compiling
from cute_flash.band import Band
from cute_flash.cli import main
from cute_flash.disk import DiskCache
from cute_flash.plan import Plan, plan
from cute_flash.problem import Problem
from cute_flash.ticker import CLEAR_LINE, ticking

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def fake_resources(spill_bytes: int = 0, serialised: tuple[str, ...] = ()):
    """Stands for a compilation: what it would find, and the plans it was asked about."""
    asked: list[Plan] = []

    def find(chosen: Plan) -> resources.Resources:
        asked.append(chosen)
        mix = Counter({"HMMA": 320, "MUFU": 64})
        return resources.Resources(
            "symbol", chosen.key.target, 168, 0, spill_bytes, 0, chosen.tile.smem_bytes, serialised, mix
        )

    return find, asked


def exit_status(argv: list[str]) -> object:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code


def test_installed_command_and_light_import() -> None:
    command = Path(sys.executable).with_name("cute-flash")
    found = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert found.stdout == f"cute-flash {cute_flash.__version__}\n"
    code = "import sys, cute_flash.cli; print({'cutlass', 'tvm_ffi', 'rich'} & set(sys.modules) or 'light')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "light\n"


def test_no_command_and_unknown_command_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert exit_status([]) == 2
    assert exit_status(["flash"]) == 2
    assert "demo" in capsys.readouterr().err


# explain


def test_explain_gives_the_numbers_of_the_roofline(capsys: pytest.CaptureFixture) -> None:
    argv = "explain 2,16,4096,128 --kv-heads 4 --seqlen-k 8192 --window 1000 0 --gpu A100 --json"
    assert main(argv.split()) == 0
    (found,) = json.loads(capsys.readouterr().out)
    problem = Problem(2, 16, 4, 4096, 8192, 128, "bfloat16", Band(1000, 0))
    chosen = plan(problem, arch.SM_80)
    tile = chosen.tile
    expected = roofline.roofline(problem, arch.SM_80)
    assert found["problem"]["band"] == {"left": 1000, "right": 0}
    assert (found["arch"], found["kernel"]) == ("sm_80", chosen.key.kernel)
    assert (found["tile"]["tile_m"], found["tile"]["tile_n"]) == (tile.tile_m, tile.tile_n)
    assert found["smem_bytes"] == tile.smem_bytes <= found["smem_limit_bytes"] == arch.SM_80.smem_per_block
    assert found["flops"] == roofline.flops(problem) == expected.flops
    assert found["flops_nominal"] == roofline.flops_nominal(problem)
    assert found["exps"] == roofline.exp_count(problem)
    assert found["least_bytes"] == roofline.hbm_bytes(problem)
    assert found["unfused_bytes"] == roofline.standard_bytes(problem)
    assert found["reread_bytes"] == roofline.fa_bytes(problem, tile.tile_m)
    assert found["max_rescales"] == roofline.max_rescales(problem, tile.tile_m, tile.tile_n)
    assert found["papers_sram_bytes"] == roofline.sram_bytes(tile.tile_m, tile.tile_n, tile.head_dim, 2)
    assert found["intensity"] == pytest.approx(expected.intensity)
    assert (found["ridge"], found["bound"]) == (pytest.approx(156), expected.bound)
    assert found["seconds"] == pytest.approx(expected.seconds)


def test_explain_text_holds_plan_and_roofline_of_every_shape(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "1024,64", "3,1024,64", "--causal", "--gpu", "sm_90", "--dtype", "fp16"]) == 0
    first, second = capsys.readouterr().out.strip().split("\n\n")
    for text, batch in ((first, 1), (second, 3)):
        problem = Problem(batch, 1, 1, 1024, 1024, 64, "float16", Band(None, 0))
        chosen, bound = plan(problem, arch.SM_90), roofline.roofline(problem, arch.SM_90)
        for line in [*chosen.lines(), *bound.lines()]:
            assert line.split(None, 1)[1] in text
        labels = [line[: explain.LABEL_WIDTH].strip() for line in text.splitlines()]
        assert {"re-reads", "rescales", "SRAM"} < set(labels) and "" not in labels


def test_explain_knows_parts_of_one_architecture(capsys: pytest.CaptureFixture) -> None:
    ridges = {}
    for name in ("A100", "h100", "H200", "A10", "L40S"):
        assert main(["explain", "2,16,4096,128", "--gpu", name, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        ridges[found["gpu"]] = round(found["ridge"])
    assert ridges == {"A100": 156, "H100": 295, "H200": 206, "A10": 208, "L40S": 419}


@pytest.mark.parametrize(
    "shape", ["", "128", "1,2,3,4,5", "2,16,4096,", "2,16,4k,128", "0,16,4096,128", "2;16;4096;128"]
)
def test_explain_refuses_what_is_no_shape(shape: str, capsys: pytest.CaptureFixture) -> None:
    assert exit_status(["explain", shape]) == 2
    assert f"{shape!r} is not a shape: write B,H,S,D" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("explain 2,16,4096,130", "the nearest is 136"),
        ("explain 2,16,4096,128 --kv-heads 3", "must be a multiple"),
        ("explain 2,16,4096,128 --gpu V100", "known are sm_80"),
        ("inspect --head-dim 512", "the nearest is 256"),
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
        "precompile --masks full,diagonal",
        "precompile --head-dims 64,,128",
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
    find, asked = fake_resources(spilled, serialised)
    monkeypatch.setattr(resources, "resources", find)
    assert (
        main(["inspect", "--head-dim", "96", "--window", "5", "none", "--arch", "sm_86", "--dtype", "fp16"])
        == status
    )
    static = asked[0].key.static
    assert (static.dtype, static.head_dim, static.has_left, static.has_right) == ("float16", 96, True, False)
    assert asked[0].key.target == "sm_86"
    out = capsys.readouterr().out
    assert "168 a thread" in out and f"{spilled} bytes spilled" in out and "HMMA 320" in out
    assert ("C7510" in out) == bool(serialised)


@pytest.mark.compiles
def test_inspect_writes_the_code_it_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sass, ptx = tmp_path / "kernel.sass", tmp_path / "kernel.ptx"
    argv = f"inspect --head-dim 64 --arch sm_80 --sass {sass} --ptx {ptx}"
    assert main(argv.split()) == 0
    out = capsys.readouterr().out
    counted = Counter(resources._INSTRUCTION.findall(sass.read_text()))["HMMA"]
    assert counted > 0 and f"HMMA {counted}," in out
    assert ".target sm_80" in ptx.read_text()


# precompile and cache


@pytest.mark.compiles
def test_precompile_fills_the_cache_once(fresh_cache: Path, capsys: pytest.CaptureFixture) -> None:
    argv = "precompile --arch sm_80 --head-dims 64 --dtypes bf16 --masks full".split()
    assert main(argv) == 0
    out, error = capsys.readouterr()
    assert "1 kernel(s) compiled, 0 already there" in out and "[1/1]" in error
    chosen = plan(Problem(3, 2, 2, 77, 99, 64), arch.SM_80)
    # The kernel of every problem of this head dim, dtype and mask.
    assert [path.stem for path in DiskCache(fresh_cache).entries()] == [compiling.digest(chosen.key)]
    assert main(argv) == 0
    assert "0 kernel(s) compiled, 1 already there" in capsys.readouterr().out
    assert main(["cache"]) == 0 and "1 kernel(s)" in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0 and "deleted" in capsys.readouterr().out
    assert main(["cache"]) == 0 and "0 kernel(s)" in capsys.readouterr().out


@pytest.mark.compiles
def test_precompile_in_several_processes(fresh_cache: Path, capsys: pytest.CaptureFixture) -> None:
    argv = "precompile --arch sm_86 --head-dims 32 --dtypes bf16,fp16 --masks full --jobs 2".split()
    assert main(argv) == 0
    assert "2 kernel(s) compiled, 0 already there" in capsys.readouterr().out
    keys = [plan(Problem(1, 1, 1, 5, 5, 32, dtype), arch.SM_86).key for dtype in ("bfloat16", "float16")]
    assert {path.stem for path in DiskCache(fresh_cache).entries()} == set(map(compiling.digest, keys))


def test_precompile_covers_the_product_of_its_lists(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    keys = []

    def precompile(chosen: Plan) -> bool:
        keys.append(chosen.key)
        return True

    monkeypatch.setattr(compiling, "precompile", precompile)
    assert main(["precompile", "--arch", "sm_90"]) == 0
    assert "12 kernel(s) compiled" in capsys.readouterr().out
    assert len(set(keys)) == 12 and {key.target for key in keys} == {"sm_90"}
    assert {(key.static.has_left, key.static.has_right) for key in keys} == {
        (False, False),
        (False, True),
        (True, True),
    }


@needs_no_gpu
def test_precompile_without_gpu_wants_an_architecture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("CUTE_FLASH_ARCH", raising=False)
    assert main(["precompile"]) == 2
    assert "--arch" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::cute_flash.disk.CacheWarning")
def test_precompile_into_a_folder_that_is_not_kept_fails(
    fresh_cache: Path, capsys: pytest.CaptureFixture
) -> None:
    fresh_cache.write_text("a file in its place")
    assert main(["precompile", "--arch", "sm_80"]) == 1
    assert "doctor" in capsys.readouterr().err


# demo


@needs_no_gpu
def test_demo_without_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    find, asked = fake_resources()
    monkeypatch.setattr(resources, "resources", find)
    assert main(["demo"]) == 0
    out, error = capsys.readouterr()
    assert out.startswith("CPU path: torch sees no CUDA GPU")
    assert out.endswith("CPU path: the result is right\n")
    compiled = [(chosen.key.target, chosen.problem.head_dim) for chosen in asked]
    assert compiled == [("sm_80", 64), ("sm_80", 128), ("sm_90", 64), ("sm_90", 128)]
    assert out.count("168 registers a thread, 0 bytes spilled, 320 MMAs") == 4
    for line in explain.Explanation.of(demo.PROBLEM, arch.SM_90).lines():
        assert line in out
    assert error.count("took") == 4


@needs_no_gpu
def test_demo_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    find, _ = fake_resources()
    monkeypatch.setattr(resources, "resources", find)
    # Every row gets the result of the row before it.
    monkeypatch.setattr(
        demo, "attn", lambda q, k, v, causal: cute_flash.attn(q, k, v, causal=causal).roll(1, dims=2)
    )
    assert main(["demo"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_nan_or_a_bad_mean_is_wrong() -> None:
    right = demo.Distance(1e-2, 1e-4)
    for bad in (
        demo.Distance(float("nan"), float("nan")),
        demo.Distance(1e-2, 3e-4),
        demo.Distance(3e-2, 1e-4),
    ):
        assert demo.Comparison(right, right, right, right).is_right
        assert not demo.Comparison(bad, right, right, right).is_right


# progress and layouts


class Terminal:
    """A stream that keeps what is written, as a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_ticker_counts_on_a_terminal_and_tells_of_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_flash.ticker.TICK_SECONDS", 0.01)
    stream = Terminal()
    deadline = time.monotonic() + 10
    with pytest.raises(KeyError), ticking("step", stream):  # type: ignore[arg-type]
        while stream.text.count(CLEAR_LINE) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyError
    first, *ticks, last = stream.text.split(CLEAR_LINE)
    assert first == "step ..."
    assert len(ticks) >= 2 and all(re.fullmatch(r"step \.\.\. \d+ s", tick) for tick in ticks)
    assert re.fullmatch(r"step: failed after \d+\.\d s\n", last)


def test_layouts_is_passed_on(capsys: pytest.CaptureFixture) -> None:
    from layouts.__main__ import main as layouts_main

    argv = ["--rows", "32", "--variant", "padded", "--color", "never"]
    assert layouts_main(argv) == 0
    expected = capsys.readouterr().out
    assert main(["layouts", *argv]) == 0
    assert capsys.readouterr().out == expected != ""
    assert main(["layouts", "--phase", "99"]) == 2
