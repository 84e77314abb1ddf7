"""Context parallelism on 2, 4 and 8 gloo processes: results and gradients are those of the call on one process.

All cases of a world size run in the same processes, once for all workers of pytest-xdist.
"""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import behaviours, processes
from tests.distributed.cases import Case, check

pytestmark = pytest.mark.processes
SIZES = (2, 4, 8)


def cases() -> Iterator[Case]:
    full, window = {"causal": False}, {"causal": False, "window": (9, 3)}
    for sharding in ("zigzag", "contiguous"):
        for method in ("ring", "allgather", "ulysses", "usp"):
            # The second length leaves a padding, and is odd.
            for mask, seqlen in (({}, 64), (full, 61), ({"window": (11, None)}, 61), (window, 64)):
                yield Case(method, sharding, heads=8, heads_kv=8 if method == "ulysses" else 2, seqlen=seqlen, **mask)
        yield Case("ring", sharding, alibi=1, sinks=True, softcap=2.0, seqlen=61)
        yield Case("allgather", sharding, alibi=2, batch=2, sinks=True, causal=False)
        yield Case("auto", sharding, head_dim_v=4, layout="bshd")
        yield Case("ring", sharding, dtype=torch.float64, head_dim_v=16, causal=False, window=(30, 5), seqlen=59)
        for method, seqlen, mask in (
            ("ring", 61, {}), ("ring", 64, window), ("allgather", 61, full), ("ulysses", 64, {}), ("usp", 61, {}),
        ):  # fmt: skip
            yield Case(method, sharding, heads=8, heads_kv=8, batch=2, seqlen=seqlen, dropout=0.4, **mask)
        yield Case("ring", sharding, dropout=0.3, alibi=1, sinks=True, softcap=2.0, seqlen=61)
        # Few K/V heads, so that groups have many steps.
        yield Case("ring", sharding, heads=8, heads_kv=1, alibi=1, sinks=True, softcap=2.0, seqlen=61)
        yield Case("ring", sharding, heads=8, heads_kv=1, dtype=torch.float64, head_dim_v=16, window=(30, 5), seqlen=59)
        yield Case("ring", sharding, heads=8, heads_kv=2, dropout=0.4, seqlen=61)
        yield Case("usp", sharding, heads=8, heads_kv=1, sinks=True, causal=False, seqlen=61)
    yield Case("ulysses", heads=8, heads_kv=1, alibi=2, batch=2, sinks=True, seqlen=61, layout="bshd")
    yield Case("usp", heads=8, heads_kv=8, alibi=1, sinks=True, window=(20, None), dtype=torch.float64)
    yield Case("ring", dtype=torch.bfloat16, heads_kv=1)
    yield Case("allgather", dtype=torch.bfloat16, heads_kv=1)
    yield Case("ring", uses_lse=False)
    yield Case("ring", seqlen=3)  # some ranks have padding only
    yield Case("allgather", "contiguous", seqlen=3, sinks=True)
    yield Case("ring", seqlen=0)
    yield Case("ring", window=(0, 0))  # no messages


def tasks(size: int) -> dict[str, Callable[[], Any]]:
    """The cases and behaviours of a world size.

    Two ranks, whose schedules are the beginning of those of four, run every other case. Eight ranks add schedules with
    longer groups: rings with GQA.
    """
    chosen = list(cases())[:: 2 if size == 2 else 1]
    if size == max(SIZES):
        chosen = [x for x in chosen if x.method in ("ring", "usp") and x.heads > x.heads_kv]
    found: dict[str, Callable[[], Any]] = {str(case): partial(check, case) for case in chosen}
    return found if size == max(SIZES) else {**found, **{function.__name__: function for function in behaviours.ALL}}


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[int], dict[str, dict[int, tuple[str | None, Any]]]]:
    """The outcome of each case, by world size."""
    folder = tmp_path_factory.getbasetemp()
    # The folder of a worker lies in that of the session.
    shared = folder if worker_id == "master" else folder.parent

    def of(size: int) -> dict[str, Any]:
        path, named = shared / f"world-{size}.pickle", tasks(size)
        with (shared / f"world-{size}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                results = processes.run(size, list(named.values()), tmp_path_factory.mktemp("store"))
                path.write_bytes(pickle.dumps(dict(zip(named, results, strict=True))))
        return pickle.loads(path.read_bytes())

    return of


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in SIZES for name in tasks(size)])
def test_results_are_those_of_one_process(size: int, name: str, outcomes: Callable[[int], dict[str, Any]]) -> None:
    ranks = outcomes(size)[name]
    errors = [f"rank {rank}: {error}" for rank, (error, _) in sorted(ranks.items()) if error]
    assert not errors, errors[0]
    assert len(ranks) == size, f"only the ranks {sorted(ranks)} ran it: an earlier case failed, or time was up"


def compiled_model_gives_the_same_gradients() -> None:
    import torch.distributed as dist

    import cute_flash.distributed as cp

    def layer(x: torch.Tensor) -> torch.Tensor:
        return cp.attn(x * 2, x, x, group=dist.group.WORLD, method="ring", causal=True) + 1

    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    # The compiled call comes first, because the first use of `cp.attn` imports its module.
    found, expected = torch.compile(layer, backend="aot_eager")(x), layer(x)
    torch.testing.assert_close(found, expected)
    (dx,), (expected_dx,) = (torch.autograd.grad(out.square().sum(), x) for out in (found, expected))
    torch.testing.assert_close(dx, expected_dx)


@pytest.mark.compiles
def test_torch_compile_breaks_the_graph(tmp_path: Path) -> None:
    (ranks,) = processes.run(2, [compiled_model_gives_the_same_gradients], tmp_path)
    assert [error for error, _ in ranks.values()] == [None, None]


def fail_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank 1 fails")
    check(Case())


def late_on_rank_1(folder: Path) -> None:
    """Rank 1 joins after rank 0 has given up."""
    import time
    from datetime import timedelta

    import torch.distributed as dist

    given_up, rank = folder / "given-up", dist.get_rank()
    dist.barrier()  # so that the timeout does not cover the start of the processes
    dist.destroy_process_group()
    limit = timedelta(seconds=4)
    dist.init_process_group("gloo", init_method=f"file://{folder}/late", rank=rank, world_size=2, timeout=limit)
    if rank == 1:
        while not given_up.exists():
            time.sleep(0.05)
        return
    try:
        check(Case())
    finally:
        given_up.touch()


@pytest.mark.parametrize("kind", ["fails", "late"])
def test_a_failing_rank_is_an_error_on_the_others(kind: str, tmp_path: Path) -> None:
    task = fail_on_rank_1 if kind == "fails" else partial(late_on_rank_1, tmp_path)
    (ranks,) = processes.run(2, [task], tmp_path)
    error, _ = ranks[0]
    assert error is not None and "step 1 of the ring, K/V: rank 0 of 2" in error
    assert "Another rank failed" in error
