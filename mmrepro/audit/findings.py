"""The types of the audit: rules, their rows in the table, their findings."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Callable, NamedTuple

CHANGES = 'changes bits'  # two runs differ, or mmrepro refuses to start because they would
MAY = 'may change bits'  # depends on the data, the machine or an interruption, not visible here
HINT = 'hint'  # runs repeat; something around them deserves attention
SEVERITIES = (CHANGES, MAY, HINT)

# settings that attach mmrepro to any config that is not pure Python
TWO_LINES: dict[str, dict[str, Any]] = dict(
    custom_imports=dict(imports=['mmrepro'], allow_failed_imports=False),
    randomness=dict(seed=42, deterministic=True))


class Found(NamedTuple):
    """A match of a check: where it is, and what is there."""
    where: str  # config key, file:line, module path or environment variable
    what: str  # the value or code there, in one line
    severity: str | None = None  # replaces the rule's


Hits = Iterator[Found]


def when(holds: Callable[[Any], Any], where: str, what: Any,
         severity: Callable[[Any], str | None] = lambda s: None) -> Callable[[Any], Hits]:
    """Return a check of one condition; ``what`` is a text, or a function of the subject."""

    def check(s: Any) -> Hits:
        if holds(s):
            yield Found(where, what(s) if callable(what) else what, severity(s))

    return check


class AuditRule(NamedTuple):
    """One row of the table."""
    name: str  # stable: --ignore and `# mmrepro: ignore[name]` take it
    severity: str  # one of SEVERITIES
    check: Callable[[Any], Hits]  # of the subject
    why: str  # what goes wrong, in one line
    link: str  # section of the documentation; letters and numbers are those of causes.md
    fix: str = ''  # what to do, besides or instead of the settings and variables
    settings: Mapping[str, Any] = {}  # of the config, with which the rule is silent
    env: Mapping[str, str] = {}  # variables of the environment with which the rule is silent

    @property
    def advice(self) -> str:
        """Settings and variables, then :attr:`fix`."""
        lines = [f'{key} = {_as_written(value)}' for key, value in self.settings.items()]
        if self.settings is TWO_LINES and self.name != 'not-attached':
            lines = ['the two lines (see not-attached)']
        lines += [f'export {name}={value}' for name, value in self.env.items()]
        return '; '.join(filter(None, [' and '.join(lines), self.fix]))


def _as_written(value: Any) -> str:
    """Return a value as configs write it."""
    if isinstance(value, dict):
        return f'dict({", ".join(f"{key}={_as_written(item)}" for key, item in value.items())})'
    if isinstance(value, list):
        return f'[{", ".join(map(_as_written, value))}]'
    return repr(value)


class AuditFinding(NamedTuple):
    """One line of the report; the fields are those of :class:`AuditRule` and :class:`Found`."""
    rule: str
    severity: str
    where: str
    what: str
    why: str
    fix: str
    link: str
