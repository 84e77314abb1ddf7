"""The cubin lock: a sample of its kernels, the coverage of its list, and the comparison."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from cute_flash.jit.describe import describe_key
from cute_flash.jit.resources import Resources
from tests.jit.gates import kernel_resources
from tests.lock import __main__ as cli
from tests.lock import decode_cases, plans, sources
from tests.lock.cases import (
    FEATURES,
    cases,
    compile_key,
    deterministic,
    kernel_name,
    kernel_names,
    plain,
    reachable,
    row_and_bounds,
    toolchain,
)
from tests.lock.cubin import digest
from tests.lock.measure import Result, defects
from tests.lock.sample import QUICK, SAMPLE

CASES = {case.name: case for case in cases()}
RECORDED = json.loads(cli.RECORDED.read_text(encoding="utf-8"))


@pytest.mark.compiles
@pytest.mark.kernels
@pytest.mark.skipif(toolchain() not in RECORDED, reason=f"no digests of {toolchain()}")
@pytest.mark.parametrize("name", SAMPLE)
def test_machine_code_is_as_recorded(name: str) -> None:
    recorded = cli.of_host(RECORDED[toolchain()])
    if name not in recorded:
        pytest.skip(f"machine code that depends on the host, and is not recorded for {cli.HOST}")
    found = digest(kernel_resources(compile_key(CASES[name])).cubin)
    assert found == recorded[name], "machine code changed: `make lock` lists all such kernels"


def test_launch_plans_are_as_recorded() -> None:
    """Grids, L2 groups and workspace of the published shapes: machine code does not show them."""
    recorded = json.loads(plans.RECORDED.read_text(encoding="utf-8"))
    assert plans.plans() == recorded, "if this is intended: python -m tests.lock.plans"
    assert len(recorded) == 2 * 2 * 48


# Coverage of the list.


@pytest.mark.slow
def test_every_row_and_bounds_that_a_plain_call_can_reach_is_locked() -> None:
    pairs = {row_and_bounds(case) for case in plain()}
    # Deterministic gradients lock every row, but not with every set of bounds.
    rows = {row_and_bounds(case)[:-1] for case in deterministic()}
    for case in reachable():
        found = row_and_bounds(case)
        assert found[:-1] in rows if case.deterministic else found in pairs, case.name


@pytest.mark.slow
def test_every_row_of_fp32_is_locked() -> None:
    tiles = {(case.direction, case.arch, compile_key(case).tile) for case in CASES.values() if case.dtype == "fp32"}
    for case in reachable():
        if case.family == "sm80" and case.head_dim <= 128 and (case.head_dim_v or 0) <= 128:
            single = replace(case, dtype="fp32")
            assert (single.direction, single.arch, compile_key(single).tile) in tiles, single.name


def test_every_kernel_and_every_feature_is_locked() -> None:
    assert {kernel_name(case) for case in CASES.values()} == kernel_names()
    for direction, features in ((("fwd", "bwd"), FEATURES), (("decode",), decode_cases.FEATURES)):
        locked = [case.features for case in CASES.values() if case.direction in direction]
        assert {name for names in locked for name in names} == set(features)


def test_decode_kernels_of_both_architectures_are_locked() -> None:
    keys = {name: compile_key(case) for name, case in CASES.items() if name.startswith("decode/")}
    latent = [key for key in keys.values() if key.static.is_latent]
    assert {key.kernel for key in latent} == {"decode_latent", "decode_latent_sm90"}
    assert {key.kernel for key in keys.values() if key not in latent} == {"decode", "fwd_split_kv"}
    for target in ("sm_80", "sm_90"):
        rows = {key.tile.tile_m for key in latent if key.target.startswith(target)}
        assert rows == ({16, 32} if target == "sm_80" else {16, 32, 64})
        found = [key for key in keys.values() if key.target.startswith(target) and key not in latent]
        assert {key.tile.tile_m for key in found} == {16, 32}
        assert {key.tile.head_dim for key in found} == {64, 128, 256, 384, 512}
        assert {key.static.page_lookup for key in found} == {"", "chunk", "row"}
        assert {key.static.rotary for key in found} == {"", "halves", "pairs"}
    assert {(key.target[:5], key.static.has_fp8_cvt) for key in keys.values() if key.static.is_fp8} == {
        ("sm_80", False), ("sm_89", False), ("sm_90", False), ("sm_90", True),
    }  # fmt: skip


def test_names_are_unique_and_each_case_is_another_kernel() -> None:
    assert len(CASES) == len(cases())
    assert len({compile_key(case) for case in CASES.values()}) == len(CASES)
    assert len(SAMPLE) == len(set(SAMPLE)) == 32


@pytest.mark.parametrize("of", RECORDED)
def test_every_case_is_recorded(of: str) -> None:
    assert set(RECORDED[of]) == set(CASES)


# Kernels that a change reaches.


def test_comments_and_docstrings_change_no_machine_code() -> None:
    text = '''"""Module."""
# A comment.
def f(x):
    """Doc
    string."""

    return x + "# no comment"  # a comment
class Error(Exception):
    """Only a docstring."""
'''
    expected = 'def f(x):\n    return x + "# no comment"\nclass Error(Exception):\n    """Only a docstring."""'
    assert sources.code(text) == expected
    assert sources.code(text.replace("A comment", "Another").replace("Doc\n", "Text\n\n")) == expected
    assert sources.code(text.replace("no comment", "text")) != expected


def test_a_kernel_reaches_what_its_class_imports() -> None:
    found = {kernel: sources.traced_modules(kernel) for kernel in kernel_names()}
    assert "cute_flash.kernels.sm90.bwd_wide" in found["bwd_sm90_wide"]
    assert not any("sm90" in module and "kernels" in module for module in found["fwd_sm80"])
    assert all("cute_flash.jit.compile" in modules and len(modules) > 20 for modules in found.values())
    # Not what only a package imports.
    tiles = "cute_flash.planning.tiles"
    assert f"{tiles}.bwd_sm90" in found["bwd_sm90"] and f"{tiles}.fwd_sm90" not in found["bwd_sm90"]
    assert tiles in found["bwd_preprocess"], "it imports a name from the package"


@pytest.mark.slow
def test_a_changed_module_reaches_its_kernels_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sources.json"
    monkeypatch.setattr(sources, "RECORDED", path)
    monkeypatch.delenv(sources.ALL, raising=False)

    def changed() -> frozenset[str]:
        for function in (sources.changed_kernels, sources.digest_of_kernel):
            function.cache_clear()
        return sources.changed_kernels()

    assert changed() == {*kernel_names(), "layouts"}
    # Only kernels all of whose cases were compiled are recorded.
    assert sources.record(path, [name for name in CASES if "/sm90/" not in name and "decode" not in name])
    assert {"fwd_sm90", "bwd_sm90", "decode"} <= changed() and not changed() & {"fwd_sm80", "merge_partials"}
    assert set(sources.record(path, CASES)) == {*kernel_names(), "layouts"} and not changed()
    of_module = sources._digest_of_module
    monkeypatch.setattr(
        sources, "_digest_of_module", lambda name: of_module(name) + "x" * (name == "cute_flash.kernels.sm90.bwd_wide")
    )
    assert changed() == {"bwd_sm90_wide", "bwd_sm90_cluster"}
    wide = "bwd/sm90/sm_90/d256/bf16/window/plain/main"
    narrow = wide.replace("d256", "d128")
    assert sources.is_reached(wide) and not sources.is_reached(narrow) and all(map(sources.is_reached, QUICK))
    monkeypatch.setenv(sources.ALL, "1")
    assert sources.is_reached(narrow)
    monkeypatch.undo()
    changed()


def test_the_quick_sample_is_a_part_of_every_gate() -> None:
    assert set(QUICK) <= set(SAMPLE)
    kernels = {sources.kernel_of(name) for name in QUICK}
    assert kernels >= {"fwd_sm80", "fwd_sm90", "bwd_sm80", "bwd_sm90", "bwd_sm90_wide", "decode", "bwd_sm80_fp32"}


# Digests.


def cubin(symbol: str, **contents: bytes) -> bytes:
    """An ELF file with sections like those of a cubin of one kernel."""
    sections = {
        ".nv.info": b"registers",
        f".nv.info.{symbol}": b"parameters",
        f".text.{symbol}": b"code",
        f".nv.constant0.{symbol}": b"constants",
        ".note.nv.tkinfo": b"options",
    }
    sections |= {name: contents[key] for key in contents for name in sections if name.startswith(key)}
    names, data, headers = b"\0", b"\x7fELF\x02\x01".ljust(64, b"\0"), [bytes(64)]
    for name, content in [*sections.items(), (".shstrtab", b"")]:
        begin, names = len(names), names + name.encode() + b"\0"
        content = content or names
        headers.append(struct.pack("<IIQQQQ", begin, 1, 0, 0, len(data), len(content)).ljust(64, b"\0"))
        data += content
    fields = struct.pack("<Q", len(data)), struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    data = data[:0x28] + fields[0] + data[0x30:0x3A] + fields[1] + data[0x40:]
    return data + b"".join(headers)


def test_digest_ignores_the_symbol_and_what_is_not_executed() -> None:
    expected = digest(cubin("kernel"))
    assert digest(cubin("another_name_of_another_length")) == expected
    assert digest(cubin("kernel", **{".note": b"other options"})) == expected


@pytest.mark.parametrize("section", [".text", ".nv.info", ".nv.info.kernel", ".nv.constant0"])
def test_digest_notices_a_changed_byte(section: str) -> None:
    assert digest(cubin("kernel", **{section: b"codf"})) != digest(cubin("kernel"))


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        digest(b"; PTX")
    with pytest.raises(ValueError, match="no kernel"):
        digest(cubin("kernel").replace(b".text.", b".data."))


def test_spills_and_serialised_wgmma_are_named() -> None:
    kernel = Resources("fwd", "sm_90a", 168, 0, 0, 0, 1024, ())
    assert defects(kernel) == ""
    assert defects(replace(kernel, spill_store_bytes=4, spill_load_bytes=8)) == "12 bytes spilled"
    assert defects(replace(kernel, serialised_wgmma=("C7510",))) == "C7510"


# The command line.


def test_check_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only, path = "fwd/sm80/sm_80/d64/bf16/*/plain/main", tmp_path / "digests.json"
    compiled: list[str] = []

    def measure_all(groups, jobs):  # type: ignore[no-untyped-def]
        for group in groups:
            compiled.append(group[0].name)
            found = digests[group[0].mask]
            yield group, Result(found, 1.5, "" if found else "no such tile", "8 bytes spilled" * (found == "b"))

    def run(code: str, *arguments: str) -> tuple[int, str]:
        """Run the command. `code` is the source digest: results of an earlier run with the same digest are reused."""
        monkeypatch.setattr(cli, "source_digest", lambda: code)
        return cli.main([*arguments, "--only", only]), "".join(capsys.readouterr())

    monkeypatch.setattr(cli, "measure_all", measure_all)
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    digests = dict.fromkeys(("full", "causal", "left", "window"), "a")
    with pytest.raises(SystemExit):
        run("old", "check", "--against", str(path))
    assert "has no digests of" in capsys.readouterr().err
    status, output = run("old", "record", str(path))
    assert status == 0 and "recorded 4 digests, and the sources of 0 kernels" in output
    assert set(json.loads(path.read_text())[toolchain()].values()) == {"a"}
    assert run("same", "check", "--against", str(path))[0] == 0

    digests |= {"causal": "b", "left": ""}
    code, output = run("new", "check", "--against", str(path))
    assert code == 1
    assert "changed: fwd/sm80/sm_80/d64/bf16/causal/plain/main" in output
    assert "CHANGED  fwd/sm80/sm_80/d64/bf16/causal/plain/main  (8 bytes spilled)" in output
    assert "failed: fwd/sm80/sm_80/d64/bf16/left/plain/main" in output and "no such tile" in output
    assert "2 same, 1 failed, 1 changed, 0 missing, 0 new" in output
    # Nothing is recorded while a kernel fails, and nothing is compiled twice.
    assert run("new", "record", str(path))[0] == 1
    digests["left"] = "c"
    compiled.clear()
    assert run("new", "record", str(path))[0] == 0
    assert compiled == ["fwd/sm80/sm_80/d64/bf16/left/plain/main"]
    recorded = json.loads(path.read_text())[toolchain()]
    assert sorted(recorded.values()) == ["a", "a", "b", "c"]

    recorded["fwd/sm80/sm_80/d64/bf16/none/plain/main"] = recorded.pop(next(iter(recorded)))
    path.write_text(json.dumps({toolchain(): recorded}))
    code, output = run("new", "check", "--against", str(path))
    assert code == 0 and "3 same, 0 failed, 0 changed, 1 missing, 1 new" in output


def test_digests_of_several_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine code of one of two kernels depends on the host; the second source changes it."""
    name, path = "fwd/sm80/sm_80/d64/bf16/full/plain/main", tmp_path / "digests.json"
    digests = {("aarch64", 1): "a", ("x86_64", 1): "b", ("aarch64", 2): "c", ("x86_64", 2): "d"}
    monkeypatch.setattr(cli, "RESULTS", tmp_path)

    def run(host: str, source: int, *arguments: str) -> tuple[int, str]:
        def measure_all(groups, jobs):  # type: ignore[no-untyped-def]
            return [(x, Result(digests[host, source] if x[0].name == name else "same", 1.0)) for x in groups]

        monkeypatch.setattr(cli, "HOST", host)
        monkeypatch.setattr(cli, "source_digest", lambda: str(source))
        monkeypatch.setattr(cli, "measure_all", measure_all)
        status = cli.main([*arguments, "--only", "fwd/sm80/sm_80/d64/bf16/*l*/plain/main"])
        return status, capsys.readouterr().out

    def entry() -> cli.Entry:
        return json.loads(path.read_text())[toolchain()][name]

    record, check = ("record", str(path)), ("check", "--against", str(path))
    assert run("aarch64", 1, *record)[0] == 0 and entry() == "a"
    assert run("x86_64", 1, *check)[0] == 1
    with pytest.raises(SystemExit):
        run("x86_64", 1, *record, "--old-host", "x86_64")
    assert run("x86_64", 1, *record, "--old-host", "aarch64")[0] == 0 and entry() == {"aarch64": "a", "x86_64": "b"}
    assert run("aarch64", 1, *check)[0] == run("x86_64", 1, *check)[0] == 0
    assert run("aarch64", 2, *check)[0] == run("x86_64", 2, *check)[0] == 1
    # An unchanged digest leaves those of other hosts alone. After a change they are of an older kernel.
    assert run("aarch64", 1, *record)[0] == 0 and entry() == {"aarch64": "a", "x86_64": "b"}
    status, output = run("aarch64", 2, *record)
    assert status == 0 and entry() == {"aarch64": "c"} and f"record again on x86_64: {name}" in output
    status, output = run("x86_64", 2, *check)
    assert status == 0 and f"not recorded on x86_64: {name}" in output and ", 0 new" in output
    assert run("x86_64", 2, *record)[0] == 0 and entry() == {"aarch64": "c", "x86_64": "d"}


def test_every_kernel_has_a_line_of_progress() -> None:
    """`describe_key` accepts every kind of kernel, also decode kernels, which have a `DecodeStatic`."""
    for case in {kernel_name(case): case for case in CASES.values()}.values():
        key = compile_key(case)
        assert describe_key(key).startswith(key.kernel)
