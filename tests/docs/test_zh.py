"""The Chinese pages of docs/zh say what the English pages say: the same code, numbers, tables and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.pages import ENGLISH, FENCE, HEADING, LINK, ROOT, ZH, anchors, name, read

MADE = re.compile(r"<!-- made: \w+ -->.*?<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*|[⁻⁰¹²³⁴-⁹]+")


def without_targets(text: str) -> str:
    return LINK.sub("]", text)


def sections(page: Path) -> list[str]:
    """The text from each heading to the next, with a mark in place of each code block."""
    text = FENCE.sub("(code)", read(page))
    starts = [match.start() for match in HEADING.finditer(text)]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)])]


def parts(section: str) -> dict[str, Counter[str] | list[str]]:
    """What a section has in both languages. Sentences may differ in their order of numbers and terms."""
    text = without_targets(section)
    return {
        "level": re.findall(r"^#+(?= )", section),
        "marks": re.findall(r"\(code\)|^ *(?:- |\d\. )|<!-- .*? -->|!\[", section, re.MULTILINE),
        "cells": [str(row.count("|")) for row in re.findall(r"^\|.*$", section, re.MULTILINE)],
        "numbers": Counter(NUMBER.findall(text)),
        "terms": Counter(re.findall(r"`[^`\n]+`", text)),
    }


def english_links(page: Path) -> Counter[tuple[str, str | int]]:
    """The links outside of code, with the position of a heading that has another anchor in each language.

    A page's link to itself in the other language is left out.
    """
    found: Counter[tuple[str, str | int]] = Counter()
    for match in LINK.finditer(FENCE.sub("", read(page))):
        path, anchor = match["path"], match["anchor"] or ""
        if re.match("[a-z]+:", path):
            found[path, anchor] += 1
            continue
        target = (page.parent / path).resolve() if path else page
        english = ENGLISH.get(target, target)
        is_in_both = english in ENGLISH.values()
        if not is_in_both or anchor or english != ENGLISH.get(page, page):
            found[name(english), anchors(target).index(anchor) if is_in_both and anchor else anchor] += 1
    return found


@pytest.fixture(params=ENGLISH, ids=name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_code_blocks_are_the_same(page: Path) -> None:
    chinese, english = ([match[0] for match in FENCE.finditer(read(x))] for x in (page, ENGLISH[page]))
    assert chinese == english


def test_generated_blocks_are_the_same(page: Path) -> None:
    chinese, english = (MADE.findall(without_targets(read(x))) for x in (page, ENGLISH[page]))
    assert chinese == english, "make plots fills in the pages of `DOCUMENTS` in profiling/documents/doc_tables.py"


def test_sections_have_the_same_numbers_and_terms(page: Path) -> None:
    chinese, english = sections(page), sections(ENGLISH[page])
    assert len(chinese) == len(english)
    for mine, theirs in zip(chinese, english):
        assert parts(mine) == parts(theirs), f"{mine.splitlines()[0]} / {theirs.splitlines()[0]}"


def test_links_are_the_same(page: Path) -> None:
    assert english_links(page) == english_links(ENGLISH[page])


def test_links_lead_to_chinese_pages(page: Path) -> None:
    """Only the first lines link to the English page."""
    linked = [(page.parent / match["path"]).resolve() for match in LINK.finditer(FENCE.sub("", read(page)))]
    assert [target for target in linked if target in ENGLISH.values()] == [ENGLISH[page]]


def test_the_readme_links_to_the_chinese_edition() -> None:
    assert "[中文](docs/zh/README.md)" in read(ROOT / "README.md").splitlines()[0]
    assert {ZH / f"{page}.md" for page in ("README", "getting-started", "how-it-works", "ladder")} <= set(ENGLISH)
