"""Update the list of modules in ``pyproject.toml`` that mypy does not check yet.

    python -m dev.unchecked_modules          # take out the modules that hold
    python -m dev.unchecked_modules --all    # list all that do not hold, after modules have moved
"""
from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = re.compile(r'(# not checked yet[^\n]*\nmodule = \[\n)(.*?)(\]\n)', re.S)


def failing(text: str) -> set[str]:
    """Return the modules in which mypy finds errors with an empty list; ``text``: pyproject."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, 'pyproject.toml')
        config.write_text(LIST.sub(r'\1    "none",\n\3', text), encoding='utf-8')
        done = subprocess.run([sys.executable, '-m', 'mypy', '--config-file', config], cwd=ROOT,
                              text=True, stdout=subprocess.PIPE)
    files = re.findall(r'^(mmrepro/\S+)\.py:\d+: error', done.stdout, re.M)
    return {file.replace('/', '.').removesuffix('.__init__') for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--all', action='store_true', help='add modules as well')
    args = parser.parse_args()
    path = ROOT / 'pyproject.toml'
    text = path.read_text(encoding='utf-8')
    before = set(re.findall(r'"(mmrepro[\w.]*)"', LIST.search(text)[2]))
    after = failing(text) if args.all else failing(text) & before
    lines = '    '
    for name in sorted(after):
        word = f'"{name}", '
        if len(lines.rpartition('\n')[2]) + len(word) > 100:
            lines = f'{lines.rstrip()}\n    '
        lines += word
    path.write_text(LIST.sub(lambda found: f'{found[1]}{lines.rstrip()}\n{found[3]}', text),
                    encoding='utf-8')
    print(f'{len(after)} modules are not checked; {len(before - after)} taken out, '
          f'{len(after - before)} added')


if __name__ == '__main__':
    main()
