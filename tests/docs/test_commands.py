"""Every command of the documents is one that the project has, with arguments that it accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cute_flash.tools import cli
from cute_flash.tools.studies import STUDIES
from examples.ladder import __main__ as ladder
from examples.ladder import counters, harness
from layouts import __main__ as layouts
from profiling import __main__ as profiling
from tests.docs.pages import DOCUMENTS, PAGES, ROOT, commands, name

PARSERS = {
    "profiling": profiling._parser,
    "layouts": layouts._parser,
    "cute_flash": cli._parser,
    "examples.ladder": ladder.parser_of_ladder,
    "examples.ladder.counters": counters.parser_of_counters,
    "examples.ladder.rung_3": lambda: harness.parser_of(ladder.rung_class("3")),
}
# Commands of the system, which are not checked.
SYSTEM = {"cd", "export", "git", "source", "nvidia-smi", "docker-compose", "open", "pre-commit", "jupyter"}


def parse(module: str, argv: list[str]) -> None:
    """Parse the arguments of `python -m module`."""
    if module == "layouts" and argv[:1] and argv[0] in STUDIES:
        module = "cute_flash"
    parser = cli._parser(argv) if module == "cute_flash" else PARSERS[module]()
    parser.parse_args(argv)


def _check_pip(words: list[str]) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        for one in extra.split(","):
            assert re.search(rf"^{one} = \[", pyproject, re.MULTILINE), f"no extra {one!r}"


def _check_python(words: list[str]) -> None:
    if words[0] == "-m" and words[1] in PARSERS:
        parse(words[1], words[2:])
    elif words[0] == "-m":
        assert words[1] in ("pip", "pytest", "venv", "http.server"), f"module {words[1]!r} is not known to this test"
    elif words[0] != "-c":
        assert (ROOT / words[0]).exists(), words[0]


def check(words: list[str]) -> None:
    program, *arguments = words
    if program == "cute-flash":
        parse("cute_flash", arguments)
    elif program in ("python", "python3"):
        _check_python(arguments)
    elif program == "pip":
        _check_pip(arguments)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in (word for word in arguments if "=" not in word):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target!r}"
    elif program == "docker" and arguments[:2] == ["compose", "run"]:
        services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
        assert next(word for word in arguments[2:] if not word.startswith("-")) in services
    else:
        assert program in SYSTEM | {"docker"}, f"{program!r} is not known to this test"


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_commands_are_accepted(page: Path) -> None:
    for words in commands(page):
        try:
            check(words)
        except SystemExit as stop:
            assert stop.code == 0, " ".join(words)


@pytest.mark.parametrize(
    "wrong", ["make nothing", "cute-flash explain --no-such 1", "python -m profiling bnch", "frob"]
)
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check(wrong.split())


def test_commands_without_a_gpu_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that compile nothing: explain, the studies and layouts."""
    ran = 0
    for page in PAGES:
        for words in commands(page):
            if words[0] == "cute-flash" and words[1] in ("explain", *STUDIES):
                assert cli.main(words[1:]) == 0, " ".join(words)
            elif words[:3] == ["python", "-m", "layouts"] and "--svg" not in words and "--figures" not in words:
                assert layouts.main(words[3:]) == 0, " ".join(words)
            else:
                continue
            ran += 1
            assert capsys.readouterr().out
    assert ran >= 6
