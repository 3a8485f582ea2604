"""The tables of commands and exit codes, as Markdown."""
from __future__ import annotations

from mmrepro.cli import VERBS
from mmrepro.errors import MEANINGS

__all__ = ['GUIDES', 'exit_codes', 'verbs']

# verb -> (what follows it in an example, the page that says how it is used)
GUIDES = {
    'demo': ('', 'tutorials/quickstart.md'),
    'train': ('CONFIG', 'tutorials/quickstart.md#3-train'),
    'test': ('CONFIG CHECKPOINT', 'explanation/testing.md'),
    'audit': ('CONFIG', 'how-to/audit.md'),
    'verify': ('CONFIG', 'how-to/verify.md'),
    'compare': ('RUN_A RUN_B', 'how-to/compare.md'),
    'localise': ('CONFIG', 'how-to/localise.md'),
    'replay': ('RUN', 'how-to/verify.md#replay-a-run'),
    'golden': ('check', 'how-to/golden.md'),
    'seeds': ('CONFIG', 'how-to/seeds.md'),
    'doctor': ('', 'how-to/check-the-environment.md'),
}


def verbs() -> str:
    """Return the table of commands, with links from the top of the docs."""
    rows = ['| command | does |', '|---|---|']
    for verb, summary in VERBS.items():
        given, page = GUIDES[verb]
        rows.append(f'| [`{" ".join(("mmrepro", verb, given)).strip()}`]({page}) '
                    f'| {summary} |')
    return '\n'.join(rows)


def exit_codes() -> str:
    """Return the table of exit codes."""
    return '\n'.join(['| exit code | meaning |', '|--:|---|',
                      *(f'| {code} | {text} |' for code, text in MEANINGS.items())])
