"""The process of one version in `profiling versions`: it makes the calls of a cell, and times them when it is asked to.

    python -m profiling.version_worker FILE_DESCRIPTOR

receives (name of a method, arguments) from the command's pipe, and answers ("value", result) or ("error", message).
`cute_flash` is that of the version, because its folder comes first in PYTHONPATH; `profiling` is that of the command.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cute_flash
from cute_flash.jit.compile import precompile_all
from cute_flash.planning.plan import CompileKey
from profiling.features import gradients_of
from profiling.host import recorded_kernels
from profiling.timing import Batch, Contender, EventTimer, GraphTimer, Timer, describe, time_batch, warm_up

# Elements of each result that are compared between versions.
MAX_COMPARED = 1 << 20


@dataclass(frozen=True)
class Cell:
    """A call in one direction."""

    direction: str  # "fwd" or "bwd"
    call: str  # of `CALLS`
    head_dim: int
    mask: str  # "full" or "causal"
    seqlen: int
    batch: int
    heads: int

    @property
    def name(self) -> str:
        return f"{self.direction} {self.call} d{self.head_dim} {self.mask} s{self.seqlen}"


def _bias(cell: Cell, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    shape = (1, cell.heads, cell.seqlen, cell.seqlen)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


# Name -> keyword arguments of `attn`.
CALLS: dict[str, Callable[[Cell, torch.device], dict[str, Any]]] = {
    "plain": lambda cell, device: {},
    "deterministic": lambda cell, device: {"deterministic": True},
    "dropout": lambda cell, device: {"dropout": 0.1},
    "softcap": lambda cell, device: {"softcap": 30.0},
    "alibi": lambda cell, device: {"alibi": torch.linspace(0.5, 0.01, cell.heads, device=device)},
    "sinks": lambda cell, device: {"sinks": torch.zeros(cell.heads, device=device)},
    "bias": lambda cell, device: {"bias": _bias(cell, device)},
}


class WallTimer(EventTimer):
    """Wall-clock time, on a machine without a GPU: to try a command, not to measure."""

    def milliseconds(self, run: Callable[[], None]) -> float:
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)

    def synchronize(self) -> None: ...

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()


class VersionWorker:
    def __init__(self, timer: Timer, device: torch.device) -> None:
        self.timer, self.device = timer, device
        self._contender: Contender | None = None
        self._batch: Batch | None = None

    def sources(self) -> set[str]:
        """The folders that contain the imported modules of `cute_flash`.

        An editable installation provides modules that the version does not have. There are two folders then.
        """
        modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "cute_flash"}
        files = [(name, Path(module.__file__).resolve()) for name, module in modules.items() if module.__file__]
        return {str(file.parents[name.count(".") + (file.name == "__init__.py")]) for name, file in files}

    def compile(self, cells: Sequence[Cell], jobs: int) -> int:
        """Compile the kernels of all cells; return their number."""
        keys: dict[CompileKey, None] = {}
        for cell in cells:
            with recorded_kernels(keys):
                self._make(cell, 0).call()
        return len(list(precompile_all(list(keys), jobs)))

    def prepare(self, cell: Cell, seed: int, budget_ms: float) -> list[Tensor]:
        """Make the call and the batch that `time` runs; return a sample of the elements of each result."""
        self._contender = self._batch = None
        with self.timer.stream():
            self._contender = self._make(cell, seed)
            torch.manual_seed(seed)
            results = self._contender.call()
            found = [_sample(x) for x in (results if isinstance(results, tuple) else (results,))]
        self._batch = warm_up(self._contender, self.timer, budget_ms)
        return found

    def time(self) -> tuple[int, float]:
        """Calls in a batch, and milliseconds of one call."""
        assert self._contender is not None and self._batch is not None, "prepare comes first"
        return self._batch.calls, time_batch(self._contender, self._batch, self.timer)

    def _make(self, cell: Cell, seed: int) -> Contender:
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
        inputs = [torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16) for _ in range(3)]
        options = CALLS[cell.call](cell, self.device)
        forward = partial(cute_flash.attn, causal=cell.mask == "causal", layout="bshd", **options)
        if cell.direction == "fwd":
            return Contender(torch.no_grad()(partial(forward, *inputs)))
        torch.manual_seed(seed)  # of the dropout mask
        return gradients_of(forward, inputs)


def _sample(x: Tensor) -> Tensor:
    flat = x.detach().flatten()
    return flat[:: -(-flat.numel() // MAX_COMPARED)].float().cpu()


def send(connection: Connection, message: Any) -> None:
    """Send by plain pickle: `Connection.send` would share the memory of tensors, which only child processes can."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def serve(connection: Connection, worker: VersionWorker) -> None:
    """Answer requests until the command closes the connection."""
    while True:
        try:
            name, arguments = receive(connection)
        except EOFError:
            return
        try:
            send(connection, ("value", getattr(worker, name)(*arguments)))
        except Exception as error:
            send(connection, ("error", describe(error)))


def main() -> None:
    has_gpu = torch.cuda.is_available()
    worker = VersionWorker(GraphTimer() if has_gpu else WallTimer(), torch.device("cuda" if has_gpu else "cpu"))
    with Connection(int(sys.argv[1])) as connection:
        serve(connection, worker)


if __name__ == "__main__":
    main()
