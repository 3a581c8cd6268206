"""The report of a run of laws: one result for each law, a table, and an error if laws are broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import LawError

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """Hold the result of one law.

    law     its id: ``"detach"``
    status  ``"passed"``, ``"failed"``, or ``"skipped"`` if it does not apply
    what    what happened, or why it was skipped, on one line; empty if it passed
    says    what the law requires
    loses   what a user loses if it does not hold
    """

    law: str
    status: Status
    what: str
    says: str
    loses: str

    def __str__(self) -> str:
        return f"{self.law}: {self.what or self.says}"


@dataclass(frozen=True)
class Report:
    """Hold the results of all laws that were run on ``subject``; ``print(report)`` shows them as a table.

    >>> report = Report("Mine", (Result("clone", "failed", "shares memory", "clone copies", "edits reach both"),))
    >>> print(report)
    Mine: 0 of 1 laws hold
      FAILED   clone            shares memory
                                lost: edits reach both
    >>> report.check()
    Traceback (most recent call last):
        ...
    torchtether.errors.LawError: Mine: breaks 1 of 1 laws: clone (shares memory; lost: edits reach both)
    """

    subject: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> tuple[Result, ...]:
        """Return the laws that hold."""
        return self._with("passed")

    @property
    def failed(self) -> tuple[Result, ...]:
        """Return the laws that do not hold."""
        return self._with("failed")

    @property
    def skipped(self) -> tuple[Result, ...]:
        """Return the laws that do not apply, each with the reason."""
        return self._with("skipped")

    @property
    def ok(self) -> bool:
        """Return whether no law failed."""
        return not self.failed

    def check(self) -> Report:
        """Return the report; if laws failed, raise LawError with each of them and what a user loses."""
        if self.failed:
            words = [f"{r.law} ({r.what}; lost: {r.loses})" for r in self.failed]
            ran = len(self.passed) + len(self.failed)
            raise LawError(f"breaks {len(words)} of {ran} laws: {'; '.join(words)}", name=self.subject)
        return self

    def __getitem__(self, law: str) -> Result:
        """Return the result of the law with this id; raise KeyError if it was not run."""
        for result in self.results:
            if result.law == law:
                return result
        raise KeyError(law)

    def __str__(self) -> str:
        ran = len(self.passed) + len(self.failed)
        lines = [f"{self.subject}: {len(self.passed)} of {ran} laws hold"]
        words = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}
        for result in self.results:
            lines.append(f"  {words[result.status]:8} {result.law:16} {result.what or result.says}")
            if result.status == "failed":
                lines.append(f"  {'':8} {'':16} lost: {result.loses}")
        return "\n".join(lines)

    def _with(self, status: Status) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.status == status)


def _cell(result: Result | None, short: bool) -> str:
    if result is None or result.status == "skipped":
        return "" if result is None else "-"
    if short or result.status == "passed":
        return "yes" if result.status == "passed" else "**no**"
    return "**no**: " + result.what.replace("|", "\\|")


def markdown(reports: Sequence[Report], *, short: bool = False) -> str:
    """Return the reports as a markdown table: a row for each law, a column for each report; ``short`` omits reasons.

    >>> print(markdown([Report("A", (Result("clone", "failed", "shares", "", ""),))]))
    | law | A |
    |---|---|
    | `clone` | **no**: shares |
    | holds | 0 of 1 |
    """
    rows = [["law", *(report.subject for report in reports)], ["---"] * (len(reports) + 1)]
    laws = list(dict.fromkeys(result.law for report in reports for result in report.results))
    for law in laws:
        row = [f"`{law}`"]
        for report in reports:
            found = next((result for result in report.results if result.law == law), None)
            row.append(_cell(found, short))
        rows.append(row)
    rows.append(["holds", *(f"{len(r.passed)} of {len(r.passed) + len(r.failed)}" for r in reports)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines[1] = "|" + "---|" * (len(reports) + 1)
    return "\n".join(lines)
