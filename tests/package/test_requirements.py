"""The requirements of pyproject.toml leave room for the packages that serving engines pin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

# The pins in the metadata (Requires-Dist) of the wheels vllm-0.33.0 and sglang-0.5.23 on PyPI, which were uploaded on
# 2026-11-02 and 2026-10-30.
PINS = {
    "vllm 0.33.0": {"apache-tvm-ffi": "0.1.11", "nvidia-cutlass-dsl": "4.8.0", "torch": "2.14.0", "nvtx": "0.2.15"},
    "sglang 0.5.23": {"apache-tvm-ffi": "0.1.11", "nvidia-cutlass-dsl": "4.8.0", "torch": "2.14.1"},
}


@pytest.mark.parametrize("engine", PINS)
def test_the_pins_of_an_engine_are_accepted(engine: str) -> None:
    page = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", page, re.MULTILINE | re.DOTALL)
    required = {one.name: one for one in map(Requirement, re.findall(r'"([^"]+)"', listed))}
    for package, version in PINS[engine].items():
        assert version in required[package].specifier, f"{engine} pins {package}=={version}"
