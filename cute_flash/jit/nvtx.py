"""NVTX ranges around planning, compiling and launching, if a profiling tool is attached or CUTE_FLASH_NVTX=1.

Otherwise there are none, because a range costs about a microsecond, a tenth of a warm call, and the import of nvtx
takes 10 ms of the first call.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

IS_MARKED = bool(os.environ.get("NVTX_INJECTION64_PATH") or os.environ.get("CUTE_FLASH_NVTX") == "1")


def marked(name: str) -> AbstractContextManager:
    """An NVTX range with this name around a `with` block, if `IS_MARKED`."""
    if not IS_MARKED:
        return nullcontext()
    import nvtx

    return nvtx.annotate(name, domain="cute_flash")
