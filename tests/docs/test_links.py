"""Links between the documents lead to files and headings that exist; README.md stays short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCUMENTS, ROOT, anchors, links, name, read

LONGEST_README = 160


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_links(page: Path) -> None:
    broken = []
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.append(path)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{path}#{anchor}")
    assert not broken


def test_links_are_found() -> None:
    assert ("docs/performance.md", "reproduce-a-number") in links(ROOT / "README.md")
    assert {"reproduce-a-number", "how-fast-on-my-shape"} <= set(anchors(ROOT / "docs" / "performance.md"))


def test_the_readme_is_short() -> None:
    assert len(read(ROOT / "README.md").splitlines()) <= LONGEST_README
