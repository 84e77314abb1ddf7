"""The documents that people read, and their parts: code blocks, commands, links and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ZH = ROOT / "docs" / "zh"
# Chinese page -> English page; test_zh compares them.
ENGLISH = {
    page: ROOT / "README.md" if page == ZH / "README.md" else ROOT / "docs" / page.relative_to(ZH)
    for page in sorted(ZH.rglob("*.md"))
}
# README.md and the pages of the site in English.
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in ENGLISH)]
DOCUMENTS = [
    *PAGES,
    *ENGLISH,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *(ROOT / folder / "README.md" for folder in ("docker", "layouts", "profiling")),
    *sorted((ROOT / "profiling" / "notes").glob("*.md")),
]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\((?P<path>[^)\s#]*)(?:#(?P<anchor>[^)\s]*))?\)")
HEADING = re.compile(r"^#{1,6} +(?P<title>.*?)(?: *\{ *#(?P<id>[\w.-]+) *\})? *$", re.MULTILINE)
INLINE_COMMAND = re.compile(r"`((?:cute-flash|python -m \w+|make|docker compose) [^`]*)`")


class Block(NamedTuple):
    language: str
    code: str


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[Block]:
    found = []
    for match in FENCE.finditer(read(page)):
        lines = match["code"].splitlines(keepends=True)
        found.append(Block(match["language"], "".join(line.removeprefix(match["indent"]) for line in lines)))
    return found


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command: of bash blocks, and of text between backticks if it has an option."""
    scripts = [block.code.replace("\\\n", " ") for block in blocks(page) if block.language == "bash"]
    prose = FENCE.sub("", read(page))
    inline = [text for text in INLINE_COMMAND.findall(prose) if " --" in text and "…" not in text]
    for line in [line for script in scripts for line in script.splitlines()] + inline:
        for part in re.split(r"&&|\|", line):
            words = shlex.split(part, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):  # an environment variable
                words = words[1:]
            if words:
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def links(page: Path) -> list[tuple[str, str]]:
    """Relative links outside of code: (path or "", anchor or "")."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", read(page)))
    found = [(match["path"], match["anchor"] or "") for match in LINK.finditer(text)]
    return [(path, anchor) for path, anchor in found if not re.match(r"[a-z]+:", path)]


def anchors(page: Path) -> list[str]:
    """The ids of the API reference and of HTML; then those of headings, as Git hosts and the site make them."""
    text = FENCE.sub("", read(page))
    found = [*re.findall(r"^::: (\S+)$", text, re.MULTILINE), *re.findall(r'id="([^"]+)"', text)]
    for match in HEADING.finditer(text):
        title = re.sub(r"\[(.*?)\]\([^)]*\)", r"\1", match["title"])
        slug = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        if match["id"]:
            found.append(match["id"])
            continue
        number, unique = 0, slug
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.append(unique)
    return found
