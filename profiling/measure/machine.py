"""Facts of a measurement: machine, versions, source, and the state of the card before and after each cell.

Driver, git and DSL may be missing: a fact that cannot be read is None, never an error.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "profiling" / "results"
PLOTS = ROOT / "profiling" / "plots"
# Folders whose source determines the kernels and the calls.
MEASURED_SOURCE = ("cute_flash",)
# Environment variables that change which kernels run.
CHOICES = ("CUTE_FLASH_ARCH", "CUTE_FLASH_KERNELS")

STATE_FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "mem_mhz",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
}
# The newer name first; drivers before 535 have only the second.
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
REASONS = {
    0x01: "gpu_idle",
    0x02: "applications_clocks_setting",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}

# Command -> its standard output, or None if it fails.
Runner = Callable[[Sequence[str]], str | None]


def run_command(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def flash_attn_3() -> dict[str, Any] | None:
    """Origin, version and digest of FlashAttention-3's library; None if there is none.

    The folder FA3_DIR does not record a version. Its file ORIGIN names the repository and the commit of the build.
    """
    folder = os.environ.get("FA3_DIR")
    if folder:
        libraries, origin = [Path(folder) / "_C.so"], Path(folder) / "ORIGIN"
        said = origin.read_text(encoding="utf-8").strip() if origin.is_file() else None
    else:
        spec = importlib.util.find_spec("flash_attn_interface")
        if spec is None or spec.origin is None:
            return None
        libraries, said = sorted(Path(spec.origin).parent.glob("flash_attn_3/_C*.so")), "package flash_attn_interface"
    found = next((path for path in libraries if path.is_file()), None)
    return {
        "origin": said,
        "version": _version("flash_attn_3"),
        "digest": None if found is None else hashlib.sha256(found.read_bytes()).hexdigest()[:16],
    }


def source_digest(root: Path = ROOT) -> str:
    """Identifies the measured code without git, or in a dirty tree."""
    digest = hashlib.sha256()
    for folder in MEASURED_SOURCE:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _gpu_facts() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"gpu": None, "capability": None, "num_sms": None, "l2_bytes": None, "memory_bytes": None}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "num_sms": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "memory_bytes": properties.total_memory,
    }


def facts(run: Runner = run_command) -> dict[str, Any]:
    status = run(("git", "status", "--porcelain"))
    driver = run(("nvidia-smi", *_selector(), "--query-gpu=driver_version", "--format=csv,noheader"))
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **_gpu_facts(),
        "driver": driver.splitlines()[0] if driver else None,
        "cpu": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "cutlass_dsl": _version("nvidia-cutlass-dsl"),
        "tvm_ffi": _version("apache-tvm-ffi"),
        "flash_attn_3": flash_attn_3(),
        "flash_attn_4": _version("flash-attn-4"),
        "ffpa": _version("ffpa-attn"),
        # Build systems set GIT_COMMIT for a copy of the tree without its history.
        "git_commit": os.environ.get("GIT_COMMIT") or run(("git", "rev-parse", "HEAD")) or None,
        "git_dirty": None if status is None else bool(status),
        "source_digest": source_digest(),
        "environment": {name: os.environ[name] for name in CHOICES if name in os.environ},
    }


def _selector() -> tuple[str, ...]:
    """Selects the card that torch uses if there are several: torch and nvidia-smi number them differently."""
    is_only_one = torch.cuda.device_count() == 1 and "CUDA_VISIBLE_DEVICES" not in os.environ
    if is_only_one or not torch.cuda.is_available():
        return ()
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return () if uuid is None else ("-i", f"GPU-{str(uuid).removeprefix('GPU-')}")


def default_path(name: str, known: dict[str, Any]) -> Path:
    """profiling/results/<gpu>/<date>-<name>.json; the folder "cpu" without a GPU. `known`: from `facts`."""
    gpu = (known["gpu"] or "cpu").lower().removeprefix("nvidia ").split()[0]
    return RESULTS / gpu / f"{datetime.date.today().isoformat()}-{name}.json"


def headline(known: dict[str, Any]) -> str:
    """The first line of a file of tables."""
    return ", ".join(f"{name} {known[name]}" for name in ("gpu", "torch", "git_commit", "source_digest", "date"))


def decode_reasons(mask: str) -> list[str]:
    """The names of the bits of `clocks_event_reasons.active`, such as 0x0000000000000004."""
    bits = int(mask, 16)
    return [name for bit, name in REASONS.items() if bits & bit]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def card_state(run: Runner = run_command) -> dict[str, Any]:
    """Clocks, power, temperature and throttle reasons; empty if nvidia-smi fails."""
    for reason_field in REASON_FIELDS:
        query = ",".join((*STATE_FIELDS, reason_field))
        answer = run(("nvidia-smi", *_selector(), f"--query-gpu={query}", "--format=csv,noheader,nounits"))
        values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer else []
        if len(values) != len(STATE_FIELDS) + 1:
            continue
        state: dict[str, Any] = dict(zip(STATE_FIELDS.values(), map(_number, values), strict=False))
        is_mask = values[-1].startswith("0x")
        return {**state, "clock_reasons": decode_reasons(values[-1]) if is_mask else None}
    return {}
