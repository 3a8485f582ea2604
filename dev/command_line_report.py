"""The table of commands, and the command line of every verb, as Markdown."""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any
from unittest import mock

from mmrepro.cli import VERBS, load
from mmrepro.exit_codes import MEANINGS

__all__ = ['GUIDES', 'lines', 'parser_of', 'verbs']

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
    'doctor': ('', 'how-to/check-a-gpu.md'),
}

class _Parser(Exception):
    """Carries a parser out of a verb before the verb does anything."""


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of a verb, as on a machine without a GPU."""
    def stop(self: argparse.ArgumentParser, *args: Any) -> None:
        raise _Parser(self)

    with mock.patch.object(argparse.ArgumentParser, 'parse_known_args', stop), \
            mock.patch('torch.cuda.is_available', return_value=False):
        try:
            load(verb)([])
        except _Parser as found:
            return found.args[0]
    raise LookupError(f'the verb {verb} has parsed no arguments')


def _value(action: argparse.Action) -> str:
    """Return the placeholder of an option's value: ``N``, ``[STEP]``, ``A B ...``."""
    if action.nargs == 0:
        return ''
    name = action.metavar or '|'.join(map(str, action.choices or ())) or action.dest.upper()
    if not isinstance(name, str):
        name = ' '.join(name)
    if action.nargs == '?':
        return f' [{name}]'
    return f' {name} ...' if action.nargs in ('+', '*') else f' {name}'


def _lines_of(action: argparse.Action, parser: argparse.ArgumentParser) -> Iterator[str]:
    value = _value(action)
    name = ', '.join(f'{option}{value}' for option in action.option_strings) or (
        str(action.metavar or action.dest))
    # the formatter fills in defaults
    said = parser._get_formatter()._expand_help(action) if action.help else ''
    yield f'`{name}`'
    yield f':   {" ".join(said.split()) or "."}'.replace(':   .', ':   see the usage.')
    yield ''


def _text(parser: argparse.ArgumentParser, text: str | None) -> str:
    return (text or '').replace('%(prog)s', parser.prog).strip()


def verbs(docs: str = '') -> str:
    """Return the table of commands; ``docs`` is the path of the docs from the page."""
    rows = ['| command | does |', '|---|---|']
    for verb, summary in VERBS.items():
        given, page = GUIDES.get(verb, ('', f'reference/command-line.md#mmrepro-{verb}'))
        rows.append(f'| [`{" ".join(("mmrepro", verb, given)).strip()}`]({docs}{page}) '
                    f'| {summary} |')
    return '\n'.join(rows)


def lines() -> str:
    """Return the exit codes and a section per verb."""
    found = ['| exit code | meaning |', '|--:|---|',
             *(f'| {code} | {text} |' for code, text in MEANINGS.items()), '']
    for verb in VERBS:
        parser = parser_of(verb)
        found += [f'## mmrepro {verb}', '', ' '.join(_text(parser, parser.description).split()), '']
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
                found += _lines_of(action, parser)
        if parser.epilog:
            found += ['```text', _text(parser, parser.epilog), '```', '']
    return '\n'.join(found)
