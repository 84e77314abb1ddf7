"""NVTX ranges around planning, compiling and launching.

Planning and compiling are always marked. Launching is marked only while a tool listens (or
CUTE_FLASH_NVTX=1): a range costs about a microsecond, which is a tenth of a warm call.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

MARKS_LAUNCHES = bool(os.environ.get("NVTX_INJECTION64_PATH") or os.environ.get("CUTE_FLASH_NVTX") == "1")


def marked(name: str) -> AbstractContextManager:
    # Here: first needed by a plan, and a good part of what `import cute_flash` would take.
    import nvtx

    return nvtx.annotate(name, domain="cute_flash")
