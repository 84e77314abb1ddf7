"""Calls in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WARM_UPS = 2


@dataclass(frozen=True, eq=False)
class Captured:
    graph: torch.cuda.CUDAGraph
    results: Any  # of the call; every replay overwrites them

    @staticmethod
    def of(call: Callable[[], Any]) -> Captured:
        """Capture a call after warm-up calls on another stream, so that compilation and planning are not captured."""
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        return Captured(graph, results)

    def replay(self) -> Any:
        """Replay the graph, wait, and return the results."""
        self.graph.replay()
        torch.cuda.synchronize()
        return self.results
