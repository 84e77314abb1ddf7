"""The seed of a call with dropout on CUDA: the state of the generator, from a table in device memory."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_flash.runtime import rng


class Generator:
    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0, "torch refuses other offsets"
        self.offset = offset


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One device without CUDA: its generator, its current stream, and the tables that were made."""
    now = SimpleNamespace(generator=Generator(5), stream=0, is_capturing=False, tables=[])

    def table(seed: int, first: int, device: torch.device) -> torch.Tensor:
        now.tables.append((seed, first))
        rows = range(first, first + rng.STEP * rng.TABLE_ROWS, rng.STEP)
        return torch.tensor([[seed, offset] for offset in rows])

    monkeypatch.setattr(rng, "_tables", {})
    monkeypatch.setattr(rng, "TABLE_ROWS", 8)
    monkeypatch.setattr(rng, "_table", table)
    monkeypatch.setattr(rng, "draw_seed", lambda device: f"drawn on {device}")
    monkeypatch.setattr(torch.cuda, "default_generators", [now.generator])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.is_capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False)
    return now


def test_each_call_takes_the_state_of_the_generator_and_advances_it(machine: Any) -> None:
    drawn = [rng.next_seed(0).tolist() for _ in range(20)]
    assert drawn == [[5, 4 * i] for i in range(20)] and machine.generator.offset == 80
    assert machine.tables == [(5, 0), (5, 32), (5, 64)], "a table serves many calls"


def test_a_restored_state_repeats_the_seed(machine: Any) -> None:
    """As activation checkpointing and `manual_seed` do. Other random operations may come between calls."""
    first = rng.next_seed(0).tolist()
    machine.generator.set_offset(12)
    assert rng.next_seed(0).tolist() == [5, 12]
    machine.generator.set_offset(0)
    assert rng.next_seed(0).tolist() == first and len(machine.tables) == 1
    machine.generator.seed = 6
    assert rng.next_seed(0).tolist() == [6, 4]
    machine.generator.set_offset(1 << 20)
    assert rng.next_seed(0).tolist() == [6, 1 << 20] and len(machine.tables) == 3


def test_streams_have_their_own_tables_and_graphs_draw_anew(machine: Any) -> None:
    rng.next_seed(0)
    machine.stream = 7
    rng.next_seed(0)
    assert machine.tables == [(5, 0), (5, 4)], "kernels of a stream write the table that it reads"
    machine.is_capturing = True
    assert rng.next_seed(0) == "drawn on cuda:0" and machine.generator.offset == 8


def test_a_table_made_in_inference_mode_serves_calls_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with torch.inference_mode():
        table = rng._table(5, 8, torch.device("cpu"))
    assert table[1].tolist() == [5, 12]
    # Autograd refuses to save inference tensors.
    x = torch.ones(2, requires_grad=True)
    (x * table[1]).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [5, 12]
