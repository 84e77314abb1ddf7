"""NVTX ranges around planning, compiling and launching.

Planning and compiling are always marked. Launching is marked only if a profiling tool is attached or CUTE_FLASH_NVTX=1,
because a range costs about a microsecond: a tenth of a warm call.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

MARKS_LAUNCHES = bool(os.environ.get("NVTX_INJECTION64_PATH") or os.environ.get("CUTE_FLASH_NVTX") == "1")


def marked(name: str) -> AbstractContextManager:
    """An NVTX range with this name around a `with` block."""
    # Imported here, because it would take a large part of the time of `import cute_flash`.
    import nvtx

    return nvtx.annotate(name, domain="cute_flash")
