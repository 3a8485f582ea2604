"""The page that lists the set-ups and their outcomes."""
from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping

from .setup import (
    EQUAL,
    FALSE_ALARM,
    FOUND,
    GOOD,
    IN_DOUBT,
    NAMED,
    NEEDLESS,
    REFUSED,
    SETUPS,
    Outcome,
)

SHOWN = 90  # characters of a line of a message, of which two are shown

MEANINGS = {
    EQUAL: 'all runs have the bits of the first one',
    FOUND: 'a self-check has ended a run, and without self-checks the bits differ',
    REFUSED: 'an error of mmrepro has ended a run, by a rule; without that, a resume differs',
    IN_DOUBT: 'the same, but the resume would be equal: the error says that it may differ',
    NAMED: 'the bits differ, and a warning or the last line of the training names the code',
}
HEAD = """\
# Code that users write

{total} set-ups{of_all}, each with another mechanism,
written as users write them and trained with default settings. Each is trained again, with two
workers, resumed at three points, without validation, or on two processes, as far as the set-up has
to do with it. Digests of each batch, the losses, the weights after each step and the metrics of
each validation are compared with the first run. That one asks for a witness, which by default runs
of this length do not have and longer ones have within their time. A set-up that a self-check has
ended is trained again without self-checks, in another process under another hash seed, and resumed
where the witness was: if the bits were equal then, it would be a false alarm. A resume that was
refused is tried again with `resume_strict=False`. If the bits were equal then, the refusal was
needless, unless its error says that the result *may* differ and names this switch.

MMEngine formats the text of a config and refuses one that holds objects, such as functions. The
text of such a set-up is written as it is; all else is MMEngine as it is installed.

`python -m dev.user_setups` trains them all and writes this page. Most were trained last when a
witness went on for two iterations instead of eight.

| outcome | set-ups | |
|---|---|---|
"""


def write(outcomes: Mapping[str, Outcome]) -> str:
    """Return the page."""
    counts = Counter(outcome.outcome for outcome in outcomes.values())
    of_all = ''
    if len(outcomes) < len(SETUPS):
        of_all = f' of {len(SETUPS)} (the others were not trained on this version yet)'
    lines = [HEAD.format(total=len(outcomes), of_all=of_all)]
    lines += [f'| {name} | {counts.pop(name, 0)} | {MEANINGS[name]} |\n' for name in GOOD]
    counts.update({FALSE_ALARM: 0, NEEDLESS: 0})  # shown, too, where there are none
    lines += [f'| **{name}** | {count} | |\n' for name, count in sorted(counts.items())]
    kinds = dict.fromkeys(SETUPS[name].kind for name in outcomes)
    for kind in kinds:
        rows = [name for name in outcomes if SETUPS[name].kind == kind]
        lines.append(f'\n## {kind[0].upper()}{kind[1:]} ({len(rows)})\n\n'
                     '| set-up | outcome | run | says |\n|---|---|---|---|\n')
        lines += [_row(name, outcomes[name]) for name in rows]
    return ''.join(lines)


def _row(name: str, outcome: Outcome) -> str:
    says = ' '.join(outcome.says.split()).replace('|', '/').replace('<', '&lt;')
    lines = textwrap.wrap(says, SHOWN, max_lines=2, placeholder=' ...')
    mark = outcome.outcome if outcome.outcome in GOOD else f'**{outcome.outcome}**'
    return f'| `{name}` | {mark} | {outcome.where} | {"<br>".join(lines)} |\n'
