"""What a rule is and what it finds."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, NamedTuple, Optional

if TYPE_CHECKING:
    from .subject import Subject

__all__ = ['CHANGES', 'HINT', 'MAY', 'SEVERITIES', 'AuditError', 'Finding', 'Found', 'Rule']

# two runs will differ, or mmrepro will refuse to start (what it refuses would make them differ)
CHANGES = 'changes bits'
# depends on something that cannot be seen from here: the data, the machine, an interruption
MAY = 'may change bits'
# runs repeat; something around them deserves a look
HINT = 'hint'
SEVERITIES = (CHANGES, MAY, HINT)


class AuditError(ValueError):
    """The config, or an argument, cannot be used."""


class Found(NamedTuple):
    """One place that a check complains about.

    Attributes:
        where: config key, ``file:line``, module path or environment variable.
        what: the value or code that is there, in one line.
        severity: replaces the rule's.
    """
    where: str
    what: str
    severity: Optional[str] = None


class Rule(NamedTuple):
    """One row of the table.

    Attributes:
        name: stable identifier; ``--ignore`` and ``# mmrepro: ignore[name]`` take it.
        severity: one of ``SEVERITIES``.
        check: ``check(subject)`` yields what it found.
        why: what goes wrong, in one line.
        cure: what to write instead.
        link: section of the documentation; letters and numbers are those of
            docs/explanation/causes.md.
    """
    name: str
    severity: str
    check: Callable[[Subject], Iterator[Found]]
    why: str
    cure: str
    link: str


@dataclass(frozen=True)
class Finding:
    """One line of the report."""
    rule: str
    severity: str
    where: str
    what: str
    why: str
    cure: str
    link: str

    def as_dict(self) -> Dict[str, Any]:
        return asdict(self)
