"""Publishes what the pages of docs/ link to outside of docs/: figures, results, other documents and sources.

A link such as `../profiling/plots/forward.svg` works in a checkout. The root of the site is docs/, so the file gets a
place in the site (`profiling/plots/forward.svg`), and the link is rewritten. A document is published with the files
that it links to. A source file becomes a page with highlighted code, and a folder becomes a list of its files.

`on_page_context` gives the pages of docs/zh the theme's Chinese texts, and sets the language switch of each page.

`WithoutForeign` extends griffe, which reads the signatures of the API reference from the sources.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# The target of an inline link without its anchor. Text in a code block matches too, but names no file.
LINK = re.compile(r"\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", "": "text"}
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"


def site_uri(path: str) -> str:
    """The place in the site of a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{path}/README.md"
    return f"source/{path}.md" if Path(path).suffix in LANGUAGES else path


def targets(page: str, text: str) -> Iterator[tuple[re.Match[str], str]]:
    """The links of a document to files and folders of the repository, with their paths."""
    for match in LINK.finditer(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), match["path"]))
        if not path.startswith("..") and (ROOT / path).exists():
            yield match, path


def listing(path: str) -> str:
    """A page with the files of a folder; sources are named without a link."""
    names = sorted(child.name for child in (ROOT / path).iterdir() if not child.name.startswith(("_", ".")))
    lines = (f"- `{name}`" if Path(name).suffix in LANGUAGES else f"- [{name}]({name})" for name in names)
    return f"{HIDDEN}# {path}\n\n" + "\n".join(lines) + "\n"


def source_page(path: str) -> str:
    language = LANGUAGES[Path(path).suffix]
    return f"{HIDDEN}# {path}\n\n~~~~{language}\n{(ROOT / path).read_text(encoding='utf-8')}\n~~~~\n"


def published(path: str, config: MkDocsConfig) -> File:
    uri = site_uri(path)
    if (ROOT / path).is_dir():
        readme = ROOT / path / "README.md"
        content = readme.read_text(encoding="utf-8") if readme.exists() else listing(path)
        return File.generated(config, uri, content=content)
    if uri.startswith("source/"):
        return File.generated(config, uri, content=source_page(path))
    return File.generated(config, uri, abs_src_path=str(ROOT / path))


def repository_path(uri: str) -> str:
    """The document of the repository that a page was made of."""
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def on_files(files: Files, config: MkDocsConfig) -> Files:
    unread = [file for file in files if file.is_documentation_page()]
    while unread:
        page = unread.pop()
        if page.src_uri.startswith("source/"):
            continue
        for _, path in targets(repository_path(page.src_uri), page.content_string):
            if files.get_file_from_path(site_uri(path)) is None:
                file = published(path, config)
                files.append(file)
                if file.is_documentation_page():
                    unread.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    folder = posixpath.dirname(uri)
    for match, path in reversed([*targets(repository_path(uri), markdown)]):
        link = posixpath.relpath(site_uri(path), folder or ".")
        markdown = f"{markdown[: match.start('path')]}{link}{markdown[match.end('path') :]}"
    return markdown


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> None:
    """The language switch leads to the same page in the other language; to the first page if there is none."""
    english, chinese = config.extra["alternate"]
    english["link"] = page.url.removeprefix("zh/")
    chinese["link"] = f"zh/{english['link']}"
    if all(other.url != chinese["link"] for other in nav.pages):
        chinese["link"] = "zh/index.html"
    config.theme["language"] = "zh" if page.url == chinese["link"] else "en"


class WithoutForeign(griffe.Extension):
    """Leaves `*extra` and `**foreign` out of signatures, as the decorator `spec.foreign.without_foreign` does."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        if any(str(decorator.value) == "without_foreign" for decorator in func.decorators):
            func.parameters = griffe.Parameters(*[x for x in func.parameters if x.name not in ("extra", "foreign")])
