"""Types and defaults of command-line arguments."""

from __future__ import annotations

import argparse
import os


def name_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name_list(text))


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be 1 or more")
    return value


def num_cores() -> int:
    return len(os.sched_getaffinity(0))
