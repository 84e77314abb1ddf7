"""Options of commands: their types, and options that are made from the fields of a settings class.

    @dataclass(frozen=True)
    class Settings:
        head_dims: tuple[int, ...] = option((64, 128))
        rounds: int = ROUNDS(6)
        window: int = 1024                                   # part of the record, but not an option

`add_options` adds --head-dims and --rounds, with their types and defaults; `settings_of` reads them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

S = TypeVar("S")


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


def option(default: Any, text: str = "", choices: Iterable[str] = (), **keywords: Any) -> Any:
    """A field of a settings class that is an option of its command.

    `choices`: the known values, or the known names of a list. `keywords`: of `add_argument`.
    """
    return field(default=default, metadata={"text": text, "choices": tuple(choices), "keywords": keywords})


# Options that many studies have; each takes its default.
ROUNDS: Callable[[int], Any] = partial(option, text="rounds; a result is their median", type=at_least_one)
MS: Callable[[float], Any] = partial(option, text="back-to-back calls in a round, in ms")
SEED: Callable[[int], Any] = partial(option, text="seed of the inputs", type=int)
LIMIT_S: Callable[[float], Any] = partial(option, text="seconds of measurement")


def _keywords(default: Any, text: str, choices: Sequence[str], keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `add_argument` for a field with this default."""
    if isinstance(default, bool):
        return {"action": "store_true", "help": text, **keywords}
    made: dict[str, Any] = {"type": str if default is None else type(default)}
    if isinstance(default, tuple):
        is_int = bool(default) and isinstance(default[0], int)
        made |= {"type": int_list if is_int else name_list, "metavar": "LIST"}
    elif isinstance(default, int):
        made |= {"type": at_least_one, "metavar": "N"}
    made |= keywords
    if made["type"] is name_list:
        text = "; ".join(filter(None, (f"of {', '.join(choices)}" if choices else "", text)))
    elif choices:
        made["choices"] = choices
    if default not in (None, ()):
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        shown = "all" if default == choices else shown
        text = f"{text} (default: {shown})" if text else f"default: {shown}"
    return {**made, "help": text}


def add_options(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add an option for each field that was made by `option`. Parsed arguments have only the options that are given."""
    for one in fields(settings):
        if one.metadata:
            parser.add_argument(
                flag(one.name), dest=one.name, default=argparse.SUPPRESS, **_keywords(one.default, **one.metadata)
            )


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def settings_of(settings: type[S], args: argparse.Namespace, base: S | None = None) -> S:
    """The settings with the options that are given; the others are those of `base`, or the defaults.

    Raises `ValueError` for an unknown name in a list.
    """
    chosen: dict[str, Any] = {}
    for one in fields(settings):  # type: ignore[arg-type]
        if one.metadata and hasattr(args, one.name):
            chosen[one.name] = value = getattr(args, one.name)
            if one.metadata["choices"] and isinstance(value, tuple):
                check_names(value, one.metadata["choices"], flag(one.name))
    return settings(**chosen) if base is None else replace(base, **chosen)  # type: ignore[type-var]


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise `ValueError` for a name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r}: choose from {', '.join(known)}")


def add_out(parser: argparse.ArgumentParser, text: str = "write all results as JSON, after each cell") -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    text = "compiling processes (default: cores)"
    parser.add_argument("--jobs", type=at_least_one, default=num_cores(), metavar="N", help=text)
