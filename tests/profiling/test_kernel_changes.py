"""Which kernels changed since a measurement."""

import json
from pathlib import Path

import pytest

from profiling.documents.kernel_changes import changed, sentence, snapshot

BEFORE = {"4.8": {"fwd/a": "1", "fwd/b": "2", "bwd/a": "3"}}


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "digests.json"
    path.write_text(json.dumps(BEFORE))
    return path


def test_nothing_changed(lock: Path) -> None:
    measured = snapshot("0123456789", "source", lock)
    assert changed(measured, lock=lock) == (3, [])
    expected = "commit `0123456`; the machine code of all 3 of their kernels in the lock is unchanged since"
    assert sentence(measured, lock=lock) == expected


def test_changed_removed_and_new_kernels(lock: Path) -> None:
    measured = snapshot("0123456789", "source", lock)
    lock.write_text(json.dumps({"4.8": {"fwd/a": "1", "fwd/b": "changed", "fwd/new": "4"}}))
    assert changed(measured, lock=lock) == (3, ["fwd/b", "bwd/a"])
    assert changed(measured, ("fwd/*",), lock) == (2, ["fwd/b"])
    assert sentence(measured, lock=lock).endswith(
        "2 of 3 of their kernels in the lock has changed since: `fwd/b`, `bwd/a`"
    )


def test_a_kernel_whose_digest_depends_on_the_host(lock: Path) -> None:
    measured = snapshot("0123456789", "source", lock)
    lock.write_text(json.dumps({"4.8": {**BEFORE["4.8"], "fwd/a": {"aarch64": "1", "x86_64": "4"}}}))
    assert changed(measured, lock=lock) == (3, [])
    assert changed(snapshot("0123456789", "source", lock), lock=lock) == (3, [])
    lock.write_text(json.dumps({"4.8": {**BEFORE["4.8"], "fwd/a": {"x86_64": "4"}}}))
    assert changed(measured, lock=lock) == (3, ["fwd/a"])


def test_patterns(lock: Path) -> None:
    measured = snapshot("0123456789", "source", lock)
    assert changed(measured, ("*/a",), lock)[0] == 2 and changed(measured, ("fwd/*", "*/a"), lock)[0] == 3
    assert changed(measured, ("*/c",), lock) == (0, [])


def test_another_toolchain(lock: Path) -> None:
    measured = snapshot("0123456789", "source", lock)
    lock.write_text(json.dumps({"4.9": BEFORE["4.8"]}))
    assert len(changed(measured, lock=lock)[1]) == 3


def test_many_changes_are_counted(lock: Path) -> None:
    many = {"digests": {"4.8": {f"fwd/{i}": "0" for i in range(7)}}, "git_commit": "0123456789"}
    assert sentence(many, lock=lock).endswith("`fwd/4` and 2 more")
