"""Metadata that depends on the repository's address; pyproject.toml has the rest.

A package index does not have the files that README.md links to. `CUTE_FLASH_REPOSITORY=https://… python -m build` adds
the project URLs, and makes the relative links and images of the README absolute. Without the variable there are no
URLs, and the relative links become their text.
"""

import os
import re
from pathlib import Path

from setuptools import setup

# An image, or a link whose text may be an image, with a path in the repository.
TARGET = r"\((?![a-z]+:|#|/)([^)\s]+)\)"
IMAGE = re.compile(rf"!\[([^]]*)\]{TARGET}")
LINK = re.compile(rf"(?<!!)\[((?:!\[[^]]*\]\([^)]*\)|[^]])*)\]{TARGET}")

repository = os.environ.get("CUTE_FLASH_REPOSITORY", "").rstrip("/")
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
readme = IMAGE.sub(rf"![\1]({repository}/raw/HEAD/\2)" if repository else "", readme)
readme = LINK.sub(rf"[\1]({repository}/blob/HEAD/\2)" if repository else r"\1", readme)
urls = {
    "Source": repository,
    "Documentation": f"{repository}/blob/HEAD/docs/index.md",
    "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
    "Issues": f"{repository}/issues",
}

setup(project_urls=urls if repository else {}, long_description=readme, long_description_content_type="text/markdown")
