"""Which kernels and launch plans changed since a measurement."""

import json
from pathlib import Path

import pytest

from profiling.documents.kernel_changes import PLANS, changed, changed_plans, sentence, snapshot

PLANS_BEFORE = {"fwd/a": "132 CTAs", "bwd/a": "L2 groups of 8 heads"}
BEFORE = {"4.8": {"fwd/a": "1", "fwd/b": "2", "bwd/a": "3"}}


def locked(folder: Path) -> Path:
    """A lock with the kernels and plans before a change."""
    (folder / PLANS).write_text(json.dumps(PLANS_BEFORE))
    lock = folder / "digests.json"
    lock.write_text(json.dumps(BEFORE))
    return lock


@pytest.mark.parametrize(
    ("now", "patterns", "count", "differ"),
    [
        (BEFORE, ("*",), 3, []),
        (BEFORE, ("*/a",), 2, []),
        (BEFORE, ("fwd/*", "*/a"), 3, []),
        (BEFORE, ("*/c",), 0, []),
        ({"4.8": {"fwd/a": "1", "fwd/b": "changed", "fwd/new": "4"}}, ("*",), 3, ["fwd/b", "bwd/a"]),
        ({"4.8": {"fwd/a": "1", "fwd/b": "changed", "fwd/new": "4"}}, ("fwd/*",), 2, ["fwd/b"]),
        # Another toolchain; a digest for each host.
        ({"4.9": BEFORE["4.8"]}, ("*/a",), 2, ["fwd/a", "bwd/a"]),
        ({"4.8": BEFORE["4.8"] | {"fwd/a": {"aarch64": "1", "x86_64": "4"}}}, ("*",), 3, []),
        ({"4.8": BEFORE["4.8"] | {"fwd/a": {"x86_64": "4"}}}, ("*",), 3, ["fwd/a"]),
    ],
)
def test_changed(now: dict, patterns: tuple[str, ...], count: int, differ: list[str], tmp_path: Path) -> None:
    lock = locked(tmp_path)
    measured = snapshot("0123456789", "source", lock)
    lock.write_text(json.dumps(now))
    assert changed(measured, patterns, lock) == (count, differ)


def test_changed_plans(tmp_path: Path) -> None:
    lock = locked(tmp_path)
    measured = snapshot("0123456789", "source", lock)
    assert changed_plans(measured, lock=lock) == (2, 0) and changed_plans(measured, ("fwd/*",), lock) == (1, 0)
    (tmp_path / PLANS).write_text(json.dumps(PLANS_BEFORE | {"bwd/a": "L2 groups of 16 heads"}))
    assert changed_plans(measured, lock=lock) == (2, 1) and changed_plans(measured, ("fwd/*",), lock) == (1, 0)
    assert sentence(measured, ("bwd/*",), lock).endswith(
        "this kernel is unchanged since; of 1 launch plans of the published shapes, 1 have changed since"
    )
    (tmp_path / PLANS).write_text("{}")
    assert changed_plans(measured, lock=lock) == (2, 2)


def test_sentence(tmp_path: Path) -> None:
    lock = locked(tmp_path)
    start = "commit `0123456`; the machine code of"
    same = snapshot("0123456789", "source", lock)
    plans = "; of 2 launch plans of the published shapes, all are unchanged since"
    assert sentence(same, lock=lock) == f"{start} all 3 of their kernels in the lock is unchanged since{plans}"
    assert sentence(same, ("fwd/b",), lock) == f"{start} this kernel is unchanged since"
    many = same | {"digests": {"4.8": {f"fwd/{i}": "0" for i in range(7)}}}
    names = ", ".join(f"`fwd/{i}`" for i in range(5))
    assert (
        sentence(many, lock=lock)
        == f"{start} 7 of 7 of their kernels in the lock has changed since: {names} and 2 more{plans}"
    )
