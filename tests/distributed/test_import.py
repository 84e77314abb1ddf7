"""`import cute_flash.distributed` imports its modules on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import cute_flash.distributed as cp
assert "cute_flash.distributed.api" not in sys.modules
assert set(cp.__all__) <= set(dir(cp))
try:
    cp.unknown
except AttributeError as error:
    assert "no attribute 'unknown'" in str(error)
cp.Choice, cp.shard
assert "cute_flash.distributed.api" not in sys.modules
from cute_flash.distributed import attn
assert attn is sys.modules["cute_flash.distributed.api"].attn is cp.attn
"""


@pytest.mark.processes
def test_modules_are_imported_on_first_use() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
