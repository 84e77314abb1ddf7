"""Progress of slow work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import re
import sys

import pytest

from cute_flash.tools.progress import step, steps

COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_a_terminal_shows_a_bar_with_the_activity_and_the_time_left() -> None:
    stream = Terminal()
    with steps("compiling", 2, stream) as done:
        done("fwd_sm90 [left]: compiled")
        done("bwd_sm90: already there")
    plain = COLOUR.sub("", stream.getvalue())
    assert "[1/2] fwd_sm90 [left]: compiled" in plain and "[2/2] bwd_sm90: already there" in plain
    assert "compiling" in plain and "━" in plain and "2/2" in plain and "0:00:00 left" in plain
    assert COLOUR.search(stream.getvalue())


def test_the_time_left_is_that_of_the_mean_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if steps take minutes."""
    now, stream = 1000.0, Terminal()
    monkeypatch.setattr("time.monotonic", lambda: now)
    with steps("timing", 4, stream) as done:
        now += 100
        done("")
        now += 200
        done("")
    assert "2/4 0:05:00 elapsed, 0:05:00 left" in COLOUR.sub("", stream.getvalue())


def test_no_color_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with steps("compiling", 1, stream) as done:
        done("fwd_sm90")
    assert "compiling" in stream.getvalue()
    assert not re.search(r"\x1b\[[\d;]*3\d", stream.getvalue())


def test_other_streams_get_a_whole_line_for_each_step() -> None:
    stream, name = io.StringIO(), "fwd_sm90 " * 30
    with steps("compiling", 2, stream) as done:
        done(name)
        done("[bold]second[/bold] 2")
    assert stream.getvalue() == f"[1/2] {name}\n[2/2] [bold]second[/bold] 2\n"


def test_one_step_on_a_terminal() -> None:
    stream = Terminal()
    with pytest.raises(KeyError), step("loading", stream):
        raise KeyError
    plain = COLOUR.sub("", stream.getvalue())
    assert "0:00:00" in plain and re.search(r"loading: failed after \d+\.\d s\n$", plain)


def test_one_step_elsewhere() -> None:
    stream = io.StringIO()
    with step("loading", stream):
        assert stream.getvalue() == "loading ...\n"
    assert re.fullmatch(r"loading \.\.\.\nloading: took \d+\.\d s\n", stream.getvalue())


def test_nothing_is_written_to_a_redirected_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's remarks are read from there."""
    remarks, stream = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with steps("compiling", 1) as done, contextlib.redirect_stderr(remarks):
        done("fwd_sm90")
    assert remarks.getvalue() == "" and "fwd_sm90" in stream.getvalue()
