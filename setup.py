"""Metadata that depends on the repository's address; pyproject.toml has the rest.

`CUTE_FLASH_REPOSITORY=https://… python -m build` adds the project URLs, and makes the relative links and images of the
README absolute, as PyPI needs them. Without the variable, the wheel has no URLs and the README is unchanged.
"""

import os
import re
from pathlib import Path

from setuptools import setup

repository = os.environ.get("CUTE_FLASH_REPOSITORY", "").rstrip("/")
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
urls = {}
if repository:
    relative = r"(?![a-z]+:|#|/)([^)\s]+)"
    readme = re.sub(rf"!\[([^]]*)\]\({relative}\)", rf"![\1]({repository}/raw/HEAD/\2)", readme)
    readme = re.sub(rf"(?<!!)\[([^]]*)\]\({relative}\)", rf"[\1]({repository}/blob/HEAD/\2)", readme)
    urls = {
        "Source": repository,
        "Documentation": f"{repository}/blob/HEAD/docs/index.md",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }

setup(project_urls=urls, long_description=readme, long_description_content_type="text/markdown")
