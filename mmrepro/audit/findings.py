"""What a rule is and what it finds."""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Optional

__all__ = ['CHANGES', 'HINT', 'MAY', 'SEVERITIES', 'TWO_LINES', 'AuditError', 'AuditFinding',
           'AuditRule', 'Found', 'Hits']

# two runs will differ, or mmrepro will refuse to start (what it refuses would make them differ)
CHANGES = 'changes bits'
# depends on something that cannot be seen from here: the data, the machine, an interruption
MAY = 'may change bits'
# runs repeat; something around them deserves a look
HINT = 'hint'
SEVERITIES = (CHANGES, MAY, HINT)

# what attaches mmrepro to any config that is not pure Python
TWO_LINES = dict(custom_imports=dict(imports=['mmrepro'], allow_failed_imports=False),
                 randomness=dict(seed=42, deterministic=True))


class AuditError(ValueError):
    """The config, or an argument, cannot be used."""


class Found(NamedTuple):
    """What a check found.

    Attributes:
        where: config key, ``file:line``, module path or environment variable.
        what: the value or code that is there, in one line.
        severity: replaces the rule's.
    """
    where: str
    what: str
    severity: Optional[str] = None


Hits = Iterator[Found]


class AuditRule(NamedTuple):
    """One row of the table.

    Attributes:
        name: stable identifier; ``--ignore`` and ``# mmrepro: ignore[name]`` take it.
        severity: one of ``SEVERITIES``.
        check: ``check(subject)`` yields what it found.
        why: what goes wrong, in one line.
        fix: what to do, besides or instead of the next two.
        link: section of the documentation; letters and numbers are those of
            docs/explanation/causes.md.
        settings: of the config, as ``--cfg-options`` takes them, with which the rule is silent.
        env: variables of the environment with which the rule is silent.
    """
    name: str
    severity: str
    check: Callable[[Any], Hits]
    why: str
    fix: str
    link: str
    settings: Mapping[str, Any] = {}
    env: Mapping[str, str] = {}

    @property
    def advice(self) -> str:
        """Settings and variables, then the rest of the advice."""
        lines = [f'{key} = {_as_written(value)}' for key, value in self.settings.items()]
        if self.settings is TWO_LINES and self.name != 'not-attached':
            lines = ['the two lines (see not-attached)']
        lines += [f'export {name}={value}' for name, value in self.env.items()]
        return '; '.join(filter(None, [' and '.join(lines), self.fix]))


def _as_written(value: Any) -> str:
    """A value as configs write it."""
    if isinstance(value, dict):
        return f'dict({", ".join(f"{key}={_as_written(one)}" for key, one in value.items())})'
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

    def as_dict(self) -> Dict[str, Any]:
        return {'cure' if name == 'fix' else name: value
                for name, value in self._asdict().items()}
