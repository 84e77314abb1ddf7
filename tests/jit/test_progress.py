"""Progress of a step: elapsed seconds on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time

import pytest

from cute_flash.jit.progress import CLEAR_LINE, progress


class Stream:
    """A stream that records its text, and is a terminal or not."""

    def __init__(self, is_terminal: bool = True) -> None:
        self.text, self.is_terminal = "", is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self.is_terminal


def test_a_terminal_shows_seconds_and_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_flash.jit.progress.UPDATE_SECONDS", 0.01)
    stream = Stream()
    deadline = time.monotonic() + 10
    with pytest.raises(KeyError), progress("step", stream):  # type: ignore[arg-type]
        while stream.text.count(CLEAR_LINE) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyError
    first, *updates, last = stream.text.split(CLEAR_LINE)
    assert first == "step ..."
    assert len(updates) >= 2 and all(re.fullmatch(r"step \.\.\. \d+ s", update) for update in updates)
    assert re.fullmatch(r"step: failed after \d+\.\d s\n", last)


def test_other_streams_get_a_line_at_the_start_and_at_the_end() -> None:
    stream = Stream(is_terminal=False)
    with progress("step", stream):  # type: ignore[arg-type]
        assert stream.text == "step ...\n"
    assert re.fullmatch(r"step \.\.\.\nstep: took \d+\.\d s\n", stream.text)
