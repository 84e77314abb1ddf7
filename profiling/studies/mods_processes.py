"""`mods --parallel`: one process for each kind of cell, head dim and function.

FlexAttention and FlashAttention-4 compile each function at its first call, for 10 to 30 s. The processes compile at the
same time and measure one after another (`GpuLock`). Each writes a file; the files are then merged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from profiling.measure.study import FAILED, OK

LIMIT_S = 600.0
# Arguments of `python -m profiling` -> exit status and output.
Runner = Callable[[Sequence[str]], tuple[int, str]]


def choices(kinds: Sequence[str], head_dims: Sequence[int], functions: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The options by which the processes differ."""
    for head_dim in head_dims:
        for kind in kinds:
            options = ("--kinds", kind, "--head-dims", str(head_dim))
            if kind == "function":
                yield from ((*options, "--functions", name) for name in functions)
            else:
                yield options


def run(
    common: Sequence[str],
    chosen: Sequence[Sequence[str]],
    folder: Path,
    run_process: Runner,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Run `mods` with the common options and those of each process; return the files. A lost process is an error."""
    paths = [folder / f"{i}.json" for i in range(len(chosen))]

    def measure(i: int) -> str | None:
        own = ("--jobs", "1", "--lock", str(folder / "lock"), "--out", str(paths[i]))
        status, output = run_process(("mods", *common, *chosen[i], *own))
        progress(" ".join(chosen[i][1::2]))
        lines = output.strip().splitlines()[-5:]
        has_ended = status in (OK, FAILED) and paths[i].exists()
        return None if has_ended else f"{' '.join(chosen[i])}: exit status {status}: {' / '.join(lines)}"

    # All at once: a process that started later would make the others wait until it has compiled.
    with ThreadPoolExecutor(len(chosen)) as pool:
        errors = [error for error in pool.map(measure, range(len(chosen))) if error is not None]
    if errors:
        print("\n".join(errors), file=sys.stderr)
        raise ValueError(f"--parallel: {len(errors)} of {len(chosen)} processes did not end")
    return paths
