"""Commands for learners and planners, whose code is in `layouts/studies` of the repository. The wheel does not hold it.

A module of a study has `add_arguments(parser)`, and `run(args)`, which returns the exit status and raises `ValueError`
for wrong arguments.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "layouts.studies"


class Study(NamedTuple):
    """A command: the name of its module, its description and examples of its arguments."""

    module: str
    text: str
    examples: tuple[str, ...]


STUDIES = {
    "tiles": Study(
        "tile_choice",
        "list tiles that fit shared memory and registers, and compare them with the tile of the kernel",
        (
            "--gpu A100 --head-dim 128 --dtype bf16",
            "--gpu X1 --smem-kb 64 --sms 40  # a GPU that the tables do not have",
        ),
    ),
    "loops": Study(
        "loop_order",
        "compare the loop orders of FlashAttention and FlashAttention-2: bytes, rescales, time",
        ("--gpu A100 --seqlen 4096 --head-dim 64", "--gpu H100 --seqlen 512,8192 --head-dim 64,128 --markdown"),
    ),
}


class MissingStudyError(Exception):
    """The command needs a checkout of the repository."""


def load(module: str, command: str) -> Any:
    """Import a module of `layouts.studies`.

    The script `cute-flash` of an editable installation does not have the checkout on its path, so it is added.

    Raises:
        MissingStudyError: This is not a checkout.
    """
    root = Path(__file__).parents[2]
    if root.joinpath(*PACKAGE.split(".")).is_dir() and str(root) not in sys.path:
        sys.path.append(str(root))
    try:
        return import_module(f"{PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("layouts"):
            raise
        raise MissingStudyError(
            f"{command} is a study that the wheel does not hold: run it in a checkout of the repository, "
            f"as python -m layouts {command} ..."
        ) from error
