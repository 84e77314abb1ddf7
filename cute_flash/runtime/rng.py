"""Draws the seed of a call with dropout: (seed, offset), int64, in device memory."""

from __future__ import annotations

import torch
from torch import Tensor

# Torch's kernels advance the offset of a generator in steps of 4.
STEP = 4
TABLE_ROWS = 1 << 14
# By device and stream: the generator's seed, the offset of the first row, and the rows (seed, offset).
_tables: dict[tuple[int, int], tuple[int, int, Tensor]] = {}


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed with torch's generator of the device, without a host sync; anew in each replay of a CUDA graph."""
    return torch.randint((1 << 63) - 1, (2,), dtype=torch.int64, device=device)


def next_seed(index: int) -> Tensor:
    """Draw a seed on the CUDA device `index`, in a sixth of the time of `draw_seed`.

    As in torch's own attention, the seed is the state of the device's generator: its seed, and its offset, which each
    call advances. Kernels read it from memory, so a table in device memory holds the offsets ahead. The result is a row
    of this table: do not write to it.
    """
    if torch.cuda.is_current_stream_capturing():
        return draw_seed(torch.device("cuda", index))
    generator = torch.cuda.default_generators[index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + STEP)
    place = index, torch._C._cuda_getCurrentRawStream(index)
    known = _tables.get(place)
    if known is not None and known[0] == seed and 0 <= offset - known[1] < STEP * TABLE_ROWS:
        return known[2][(offset - known[1]) // STEP]
    table = _table(seed, offset, torch.device("cuda", index))
    _tables[place] = seed, offset, table
    return table[0]


def _table(seed: int, first: int, device: torch.device) -> Tensor:
    """The rows (seed, offset) of the offsets from `first`, written by kernels of the current stream.

    The table is no inference tensor: later calls, outside of inference mode, save its rows for their backward.
    """
    with torch.cuda.device(device), torch.inference_mode(False):
        table = torch.empty(TABLE_ROWS, 2, dtype=torch.int64, device=device)
        table[:, 0] = seed - (1 << 64) * (seed >= 1 << 63)
        table[:, 1] = torch.arange(first, first + STEP * TABLE_ROWS, STEP, device=device)
    return table
