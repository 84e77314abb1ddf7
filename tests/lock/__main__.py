"""Compile the kernels of the lock and compare their digests with the recorded ones; see `tests.lock`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from cute_flash.tools.progress import steps
from tests.lock import sources
from tests.lock.cases import AnyCase, cases, compile_key, source_digest, toolchain
from tests.lock.measure import measure_all

RECORDED = Path(__file__).with_name("digests.json")
# Results of the current source, so that an interrupted run resumes and nothing is compiled twice.
RESULTS = Path(__file__).parents[2] / "build" / "lock"
# For some kernels the compiler orders instructions differently on hosts of different architecture. Their entry has a
# digest for each host: {"aarch64": digest, "x86_64": digest}.
HOST, HOSTS = platform.machine(), ("aarch64", "x86_64")
Entry = str | dict[str, str]


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(path)


def of_host(entries: dict[str, Entry]) -> dict[str, str]:
    """The digests of this host by name, without kernels that have digests of other hosts only."""
    found = {name: entry if isinstance(entry, str) else entry.get(HOST, "") for name, entry in entries.items()}
    return {name: value for name, value in found.items() if value}


def new_entry(entry: Entry | None, found: str, old_host: str | None) -> Entry:
    """The entry of a kernel with the digest `found` on this host. `old_host`: the host that a string is kept for."""
    if isinstance(entry, str) and entry != found and old_host is not None:
        return {old_host: entry, HOST: found}
    if not isinstance(entry, dict):
        return found
    # If the kernel has changed, the digests of other hosts are those of the kernel before.
    return {**(entry if entry.get(HOST, found) == found else {}), HOST: found}


def digests_of(chosen: Sequence[AnyCase], recorded: dict[str, str], jobs: int) -> dict[str, str]:
    """The digest of every case by name, "" for those that failed, with a line of progress for each kernel."""
    path = RESULTS / f"{toolchain()}-{HOST}-{source_digest()[:16]}.json"
    found: dict[str, str] = read(path)
    groups: dict[object, list[AnyCase]] = {}
    for case in chosen:
        try:
            key: object = compile_key(case)
        except Exception:
            key = case  # it fails again when it is compiled, and is reported then
        groups.setdefault(key, []).append(case)
    wanted = []
    for group in groups.values():
        known = next((found[case.name] for case in group if case.name in found), None)
        if known is None:
            wanted.append(group)
        else:
            found.update({case.name: known for case in group})
    print(f"{len(chosen)} cases, {len(groups)} kernels, {len(groups) - len(wanted)} known from {path}")
    failed: dict[str, str] = {}
    begin = time.perf_counter()
    with steps("compiling", len(wanted)) as done:
        for group, result in measure_all(wanted, jobs):
            verdicts = []
            for case in group:
                verdict = "failed"
                if result.digest:
                    verdict = {None: "new", result.digest: "same"}.get(recorded.get(case.name), "CHANGED")
                verdicts.append(f"{verdict:7}  {case.name}")
                (found if result.digest else failed)[case.name] = result.digest
            note = result.note and f"  ({result.note})"
            done(f"{result.seconds:5.1f} s  {', '.join(verdicts)}{note}")
            if result.error:
                print(result.error, flush=True)
            write(path, found)
    print(f"{len(wanted)} kernels compiled in {time.perf_counter() - begin:.0f} s by {jobs} process(es)")
    return {case.name: found.get(case.name, "") for case in chosen}


def report(found: dict[str, str], recorded: dict[str, str], of_others: set[str]) -> bool:
    """Print the differences; true if nothing changed and nothing failed. `of_others`: recorded on other hosts only."""
    lists = {
        "failed": [name for name in found if not found[name]],
        "changed": [name for name in found if found[name] and recorded.get(name, found[name]) != found[name]],
        "missing": [name for name in recorded if name not in found],
        f"not recorded on {HOST}": [name for name in found if found[name] and name in of_others],
        "new": [name for name in found if found[name] and name not in recorded and name not in of_others],
    }
    for what, names in lists.items():
        for name in names:
            print(f"{what}: {name}")
    same = sum(bool(value) and recorded.get(name) == value for name, value in found.items())
    always = ("failed", "changed", "missing", "new")
    counts = ", ".join(f"{len(names)} {what}" for what, names in lists.items() if names or what in always)
    print(f"{toolchain()}: {same} same, {counts}")
    return not lists["changed"] and not lists["failed"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lock", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="compare with recorded digests")
    check.add_argument("--against", metavar="FILE", type=Path, default=RECORDED)
    record = commands.add_parser("record", help="write the digests of this code")
    record.add_argument("against", metavar="FILE", type=Path)
    record.add_argument(
        "--old-host",
        metavar="MACHINE",
        choices=HOSTS,
        help=f"digests that differ are of MACHINE ({', '.join(HOSTS)}): keep them beside those of {HOST}",
    )
    for command in (check, record):
        command.add_argument("--jobs", metavar="N", type=int, default=1, help="kernels compiled at a time")
        command.add_argument("--only", metavar="PATTERN", default="*", help="only cases whose names match (fnmatch)")
    options = parser.parse_args(arguments)
    # A process compiles with one thread; more torch threads would only compete for cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [case for case in cases() if fnmatch(case.name, options.only)]
    of_all = read(options.against)
    all_recorded = of_all.get(toolchain(), {})
    old = {name: entry for name, entry in all_recorded.items() if fnmatch(name, options.only)}
    recorded = of_host(old)
    if not chosen:
        parser.error(f"no name of a case matches {options.only}")
    if options.command == "check" and not recorded:
        where = f"{toolchain()} on {HOST}"
        parser.error(f"{options.against} has no digests of {where}: record them with a commit that you trust")
    if options.command == "record" and options.old_host == HOST:
        parser.error(f"--old-host {HOST}: this is {HOST}")
    found = digests_of(chosen, recorded, options.jobs)
    is_fine = report(found, recorded, set(old) - set(recorded))
    if options.command == "check":
        if is_fine and options.against == RECORDED and sources.changed_kernels():
            print(f"the sources of {len(sources.changed_kernels())} kernels are not those recorded: see `record`")
        return 0 if is_fine else 1
    if not all(found.values()):
        return 1
    others = {name: entry for name, entry in all_recorded.items() if name not in old}
    new = {name: new_entry(old.get(name), value, options.old_host) for name, value in found.items()}
    for name, entry in old.items():
        hosts = set(entry) - set(new.get(name, ())) if isinstance(entry, dict) else ()
        if hosts:
            print(f"record again on {', '.join(sorted(hosts))}: {name}")
    write(options.against, {**of_all, toolchain(): {**others, **new}})
    checked = sources.record(options.against.with_name(sources.RECORDED.name), found)
    print(f"recorded {len(found)} digests, and the sources of {len(checked)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
