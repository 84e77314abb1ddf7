"""`make docs`: the site builds without a warning, and every public name, link and figure is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import cute_flash
from tests.docs.pages import ROOT, anchors

pytest.importorskip("mkdocs")


def test_every_public_name_has_an_entry() -> None:
    assert {f"cute_flash.{name}" for name in cute_flash.__all__} <= set(anchors(ROOT / "docs" / "api.md"))


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - set(re.findall(r": (\S+\.md)$", config, re.MULTILINE)) == set()


class _Targets(HTMLParser):
    """The targets of links and images, and the ids, of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name, tag) in (("href", "a"), ("src", "img"), ("src", "script"), ("href", "link")):
                self.targets.append(value)
            if value and name == "id":
                self.ids.add(value)


@pytest.mark.processes
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    site = tmp_path / "site"
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr

    pages = {page: _Targets(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    assert {f"cute_flash.{name}" for name in cute_flash.__all__} <= pages[site / "api.html"].ids
    assert not re.search("\\*(extra|foreign)", re.sub("<[^>]*>", "", (site / "api.html").read_text(encoding="utf-8")))
    for name, language, other in (
        ("how-it-works", "en", "zh/how-it-works.html"),
        ("zh/how-it-works", "zh", "../how-it-works.html"),
        ("zh/index", "zh", "../index.html"),
        ("decode", "en", "zh/index.html"),
    ):
        text = (site / f"{name}.html").read_text(encoding="utf-8")
        assert f'<html lang="{language}"' in text and other in re.findall(r'<a href="(\S+)" hreflang', text)
    broken = []
    for page, parsed in pages.items():
        for target in parsed.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc or page.name == "404.html":
                continue
            file = (page.parent / unquote(url.path)).resolve() if url.path else page
            file = file / "index.html" if file.is_dir() else file
            has_anchor = not url.fragment or file not in pages or unquote(url.fragment) in pages[file].ids
            if not file.exists() or not has_anchor:
                broken.append(f"{page.relative_to(site)}: {target}")
    assert not broken, "\n".join(broken)
