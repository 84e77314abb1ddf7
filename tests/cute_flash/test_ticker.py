"""Progress of one step: seconds that count up on a terminal, one line elsewhere."""

from __future__ import annotations

import re
import time

import pytest

from cute_flash.jit.progress import CLEAR_LINE, ticking


class Terminal:
    """A stream that keeps what is written, as a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_ticker_counts_on_a_terminal_and_tells_of_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_flash.jit.progress.TICK_SECONDS", 0.01)
    stream = Terminal()
    deadline = time.monotonic() + 10
    with pytest.raises(KeyError), ticking("step", stream):  # type: ignore[arg-type]
        while stream.text.count(CLEAR_LINE) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyError
    first, *ticks, last = stream.text.split(CLEAR_LINE)
    assert first == "step ..."
    assert len(ticks) >= 2 and all(re.fullmatch(r"step \.\.\. \d+ s", tick) for tick in ticks)
    assert re.fullmatch(r"step: failed after \d+\.\d s\n", last)
