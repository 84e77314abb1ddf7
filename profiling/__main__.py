"""The command `python -m profiling`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cute_flash.tools.cli import HELP_FORMATTER, add_command
from profiling.bench import bench
from profiling.counters import ncu_run, sanitize
from profiling.documents import command as plots
from profiling.documents import every_run
from profiling.measure.study import NOT_MEASURED, Command
from profiling.studies import context_parallel, features, fp32, host, mla, mods, numerics_gpu, standard_bytes, training
from profiling.tune import tune, versions

DESCRIPTION = "Measure cute_flash beside other libraries, tune its tiles, and compare counters with predictions."
COMMANDS: tuple[Command, ...] = (
    bench.STUDY.command,
    host.STUDY.command,
    features.STUDY.command,
    mods.COMMAND,
    fp32.STUDY.command,
    mla.COMMAND,
    training.STUDY.command,
    context_parallel.STUDY.command,
    standard_bytes.COMMAND,
    numerics_gpu.COMMAND,
    tune.COMMAND,
    versions.COMMAND,
    ncu_run.COMMAND,
    sanitize.COMMAND,
    every_run.COMMAND,
    plots.COMMAND,
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m profiling", description=DESCRIPTION, formatter_class=HELP_FORMATTER
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command in COMMANDS:
        sub = add_command(commands, command.name, command.help, *command.examples)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return NOT_MEASURED
    try:
        status: int = args.run(args)
        return status
    except (ValueError, OSError) as error:
        # A wrong argument or file; these errors come before anything is measured.
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return NOT_MEASURED


if __name__ == "__main__":
    sys.exit(main())
