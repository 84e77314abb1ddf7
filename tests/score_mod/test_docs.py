"""The examples of docs/mods.md run, print what the page says, and draw the pictures that it shows.

`python -m tests.score_mod.test_docs` draws them again.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "mods.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[.*?\]\((.*?)\)")


class Example(NamedTuple):
    title: str
    code: str
    output: str  # "": not shown
    image: Path | None


def examples() -> Iterator[Example]:
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        blocks = FENCE.findall(body)
        image = IMAGE.search(body)
        for i, (language, code) in enumerate(blocks):
            if language == "python":
                shown = blocks[i + 1][1] if i + 1 < len(blocks) and blocks[i + 1][0] == "text" else ""
                yield Example(title, code, shown, PAGE.parent / image[1] if image else None)


def run(example: Example) -> tuple[dict[str, Any], str]:
    torch.manual_seed(0)
    known: dict[str, Any] = {"__name__": "example"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example.code, f"{PAGE} ({example.title})", "exec"), known)
    return known, printed.getvalue()


@pytest.mark.parametrize("example", [*examples()], ids=lambda example: example.title)
def test_example(example: Example) -> None:
    known, printed = run(example)
    if example.output:
        assert printed.rstrip() == example.output.rstrip()
    if example.image is not None:
        assert example.image.read_text() == known["picture"]
    assert ("picture" in known) == (example.image is not None)


def test_all_six_are_there() -> None:
    titles = " ".join(example.title for example in examples())
    for name in ("ALiBi", "T5", "Prefix", "Documents", "tree", "Soft-capped"):
        assert name in titles
    shown = {example.image.name for example in examples() if example.image}
    assert shown == {path.name for path in (PAGE.parent / "masks").glob("*.svg")}


if __name__ == "__main__":
    for one in examples():
        if one.image is not None:
            one.image.write_text(run(one)[0]["picture"])
