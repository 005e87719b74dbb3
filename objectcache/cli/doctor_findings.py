"""Findings of `objectcache doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FindingState(Enum):
    """`missing` is something that would make this server faster or more able; `problem` should be changed."""

    GOOD = "good"
    MISSING = "missing"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, the state that was found, and advice."""

    what: str
    state: FindingState
    found: str
    advice: str = ""


def described(findings: Sequence[Finding]) -> str:
    """A line for each finding, and one more where there is something to do. Pure."""
    width = max((len(finding.what) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state.value:<8} {finding.what:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)
