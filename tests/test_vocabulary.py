"""Words of earlier versions stay out of code, tests and docs."""
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = ('.py', '.md', '.sh', '.cfg', '.toml', '.yml')
# old word -> what to say; the field's words, see docs/reference/glossary.md
RETIRED = {
    r'\bbitten\b': 'affects', r'\bparting\b': 'divergence', r'\bpiled\b': 'overlapping',
    r'\bstand-ins?\b': 'stubs', r'\bmade anew\b': 'regenerated', r'\bdata sets?\b': 'dataset',
    r'\bwho answers for\b': 'provided by', r'\bother bits\b': 'different bits',
    r'\bcures?\b': 'fix', r'\bTurnSeedHook\b': 'HookSeedHook',
    r'\b(PlacedInt|PlacedTuple)\b': 'PositionedInt, PositionedTuple',
}
# keys of files and JSON output that keep an old word, and this list
ALLOWED = re.compile(
    r"""['"](cure|parting)['"]|"(cure|parting)"|\b(cure|parting)=|called "cure"|'TurnSeedHook'"""
    r"""|hook:TurnSeedHook|MARK = 'mmrepro demonstration data set'""")


def texts():
    listed = subprocess.run(['git', '-C', str(ROOT), 'ls-files'], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip('not a git checkout')
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in SUFFIXES and path.is_file() and path != Path(__file__) and (
                'docs/results/' not in name and name != 'tests/docs/test_links.py'):
            yield name, path.read_text(encoding='utf-8')


def test_no_retired_word_is_left():
    found = [f'{name}:{number}: {line.strip()} (say: {say})'
             for name, text in texts() for number, line in enumerate(text.splitlines(), 1)
             for word, say in RETIRED.items()
             if re.search(word, ALLOWED.sub('', line), re.I)]
    assert found == []
