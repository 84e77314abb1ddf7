"""Random cases of context parallelism; `make nightly` runs them for a minute (`--fuzz-seconds`)."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed import processes
from tests.distributed.cases import Case, check

pytestmark = pytest.mark.processes
LEAST_CASES = 24
CASES_PER_SECOND = 4


def random_case(rng: random.Random, size: int) -> Case:
    heads_kv = rng.choice((1, 2, size, 2 * size))
    bound = (None, 0, 3, 17, 40)
    return Case(
        method=rng.choice(("ring", "ring", "allgather", "ulysses", "usp", "auto")),
        sharding=rng.choice(("zigzag", "contiguous")),
        causal=rng.random() < 0.5,
        window=(rng.choice(bound), rng.choice(bound)),
        seqlen=rng.randint(0, 90),
        batch=rng.randint(1, 2),
        heads=heads_kv * (size if heads_kv < size else 1),
        heads_kv=heads_kv,
        head_dim=8 * rng.randint(1, 2),
        head_dim_v=8 * rng.randint(1, 2),
        dtype=rng.choice((torch.float32, torch.float64)),
        layout=rng.choice(("bhsd", "bshd")),
        softcap=rng.choice((None, 3.0)),
        alibi=rng.choice((0, 0, 1, 2)),
        sinks=rng.random() < 0.3,
        uses_lse=rng.random() < 0.7,
        dropout=rng.choice((None, None, 0.5)),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_random_cases(size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--fuzz-seconds")
    # A new seed for each nightly run; a failure prints its case.
    rng = random.Random() if seconds else random.Random(size)
    cases = [random_case(rng, size) for _ in range(max(LEAST_CASES, int(seconds * CASES_PER_SECOND / 2)))]
    outcomes = processes.run(size, [partial(check, case) for case in cases], tmp_path, processes.WHOLE_RUN + seconds)
    for case, ranks in zip(cases, outcomes):
        for rank, (error, _) in ranks.items():
            assert error is None, f"{case!r} on rank {rank} of {size}: {error}"
        assert len(ranks) == size, f"{case!r}: time was up"
