"""Counts, failures and expected differences of the results of a suite."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_SLOWEST = 5


@dataclass
class Summary:
    """The results of one step."""

    passed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)  # (case, reason)
    expected: Counter[str] = field(default_factory=Counter)  # differences by reason
    skips: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    unfinished: list[str] = field(default_factory=list)
    seconds: list[tuple[float, str]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.failures and not self.unfinished

    def text(self, title: str) -> str:
        numbers = {
            "passed": self.passed,
            "failed": len(self.failures),
            "expected differences": self.expected.total(),
            "skipped": self.skips.total(),
        }
        lines = [f"{title}: " + ", ".join(f"{number} {word}" for word, number in numbers.items())]
        for word, counts in (("expected", self.expected), ("skipped", self.skips), ("note", self.notes)):
            lines += [f"  {word} ({number}): {reason}" for reason, number in counts.most_common()]
        lines += [f"  FAILED {name}\n    {reason}" for name, reason in self.failures]
        lines += [f"  UNFINISHED {line}" for line in self.unfinished]
        slowest = [f"{seconds:.1f} s {name[:90]}" for seconds, name in sorted(self.seconds, reverse=True)]
        lines += [f"  slowest: {'; '.join(slowest[:NUM_SLOWEST])}"] if slowest else []
        return "\n".join(lines)


def _failure(element: ET.Element) -> str:
    """The line of a test that failed, and its error."""
    lines = (element.text or "").splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    code = [line.strip() for line in lines if line.startswith("    ") and line.strip(" ^~")]
    return " | ".join(filter(None, [*code[-1:], *errors[:3]]))[:400] or element.get("message", "")[:300]


def add_junit(summary: Summary, root: ET.Element) -> None:
    """Add the cases of a junit file.

    The number of passed cases comes from the counts of the suite, which leave out an interrupted case. Its <testcase>
    looks like that of a passed one.
    """
    for suite in root.iter("testsuite"):
        tests, *others = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
        summary.passed += tests - sum(others)
    for case in root.iter("testcase"):
        name = re.sub(r"^test_case\[(.*)\]$", r"\1", case.get("name", ""))
        summary.seconds.append((float(case.get("time", 0)), name))
        failure = next((x for x in case if x.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if failure is not None:
            summary.failures.append((name, _failure(failure)))
        elif skip is not None:
            is_expected = skip.get("type") == "pytest.xfail"
            reason = skip.get("message", "").removeprefix("Skipped: ")
            (summary.expected if is_expected else summary.skips)[reason[:200]] += 1


def add_checks(summary: Summary, rows: list[dict[str, Any]], refused: dict[str, str]) -> None:
    """Add the results of FlexAttention's checks; `refused` has the mods that cute_flash may refuse."""
    for row in rows:
        name, status = f"{row['mod']} D={row['D']}", row["status"]
        summary.seconds.append((row["seconds"], name))
        if "torch_error" in row:
            summary.notes["torch's kernel does not compile; compared with fp32 only"] += 1
        if status == "passed":
            summary.passed += 1
        elif status == "refused" and row["mod"] in refused:
            summary.expected[f"{row['mod']}: {refused[row['mod']]}"] += 1
        else:
            wrong = {key: value for key, value in row.items() if isinstance(value, dict) and not value["ok"]}
            summary.failures.append((name, f"{status} {row.get('why', '')} {wrong or ''}"))


def summarize(folder: Path, refused: dict[str, str]) -> Summary:
    """The results of a step in its folder: junit files and JSON of checks, and the exit codes of the processes."""
    summary = Summary()
    for path in sorted(folder.glob("[0-9]*.xml")):
        add_junit(summary, ET.parse(path).getroot())
    for path in sorted(folder.glob("[0-9]*.json")):
        add_checks(summary, json.loads(path.read_text(encoding="utf-8")), refused)
    codes = folder / "returncodes.json"
    for index, code in enumerate(json.loads(codes.read_text(encoding="utf-8")) if codes.exists() else []):
        # pytest exits with 1 after failures, and with 5 without any case.
        if code != 0 and not (code in (1, 5) and (folder / f"{index}.xml").exists()):
            log = (folder / f"{index}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            summary.unfinished.append(f"process {index}: exit code {code}; {' / '.join(log[-4:])[:400]}")
    return summary
