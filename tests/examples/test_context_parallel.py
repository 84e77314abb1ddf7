"""The example of context parallelism: losses on several processes follow those of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from examples import context_parallel
from tests.distributed import processes
from tests.examples.test_examples import printed_in_docs, shape_of

pytestmark = pytest.mark.processes


def losses_of_a_rank(steps: int) -> list[float]:
    return context_parallel.train(dist.group.WORLD, steps)


def test_four_ranks_follow_the_loss_of_one_process(tmp_path: Path) -> None:
    (ranks,) = processes.run(4, [partial(losses_of_a_rank, 50)], tmp_path)
    single = context_parallel.train(None, 50)
    assert single[-1] < single[0] / 10 and len(ranks) == 4
    for error, losses in ranks.values():
        assert error is None
        assert losses == pytest.approx(single, rel=1e-3, abs=1e-4)


def test_the_script_prints_both_losses(capsys: pytest.CaptureFixture[str]) -> None:
    sharded, single = context_parallel.main(ranks=2, steps=10)
    assert sharded == pytest.approx(single, rel=1e-3)
    printed = {shape_of(line) for line in capsys.readouterr().out.splitlines()}
    assert printed and printed == {shape_of(line) for line in printed_in_docs("context_parallel")}
