"""Run MMEngine's own tests with mmrepro active: those that pass without it have to pass.

    git clone -b v0.10.7 https://github.com/open-mmlab/mmengine
    python dev/mmengine_tests.py mmengine

Runs the tests twice, as they are and with mmrepro imported first, and lists the tests that only the
second run fails. Those of :data:`EXPECTED` are known, each with its reason; any other one is an
error. Takes minutes and needs the packages of ``requirements/tests.txt``.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

FOLDERS = ('test_runner', 'test_hooks', 'test_data', 'test_dataset', 'test_evaluator', 'test_optim',
           'test_model')

# test -> why it fails with mmrepro; none of them is about what a run computes
_RUNNER = 'tests.test_runner.test_runner.TestRunner::'
EXPECTED: dict[str, str] = {
    f'{_RUNNER}test_build_dataloader': 'asks for the seed that MMEngine gives a sampler',
    f'{_RUNNER}test_custom_hooks': 'counts the hooks',
    f'{_RUNNER}test_register_hooks': 'counts the hooks',
    f'{_RUNNER}test_train': "asks for the class of the loop's iterator",
}


def run_pytest(start: list[str], arguments: list[str], folder: Path, env: dict[str, str]
               ) -> tuple[set[str], int]:
    """Run pytest in ``folder``; return the tests that fail and the number of tests that ran.

    ``start`` is the command that runs pytest, ``env`` the variables beside those of this process.

    Raises:
        RuntimeError: pytest itself failed, for example because a folder does not exist.
    """
    with tempfile.TemporaryDirectory() as results:
        report = Path(results, 'report.xml')
        done = subprocess.run(
            [*start, '-q', '-p', 'no:cacheprovider', '--continue-on-collection-errors',
             f'--junitxml={report}', *arguments],
            cwd=folder, env={**os.environ, 'OMP_NUM_THREADS': '1', **env}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        if done.returncode > 1:
            raise RuntimeError(f'pytest in {folder} ended with exit code {done.returncode}:\n'
                               f'{done.stdout[-3000:]}')
        cases = [case for case in ElementTree.parse(report).iter('testcase')
                 if case.find('skipped') is None]
        return {f'{case.get("classname")}::{case.get("name")}' for case in cases
                if case.find('failure') is not None or case.find('error') is not None}, len(cases)


def failed(checkout: Path, folders: list[str], active: bool) -> tuple[set[str], int]:
    """Return the tests that fail and the number of tests; ``active``: mmrepro is imported first."""
    return run_pytest([sys.executable, '-m', 'pytest', *(['-p', 'mmrepro'] if active else [])],
                      [f'tests/{name}' for name in folders], checkout, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkout', type=Path, help='a checkout of MMEngine')
    parser.add_argument('--folders', nargs='+', default=list(FOLDERS), metavar='FOLDER',
                        help='folders of its tests')
    args = parser.parse_args()
    missing = [name for name in args.folders if not (args.checkout / 'tests' / name).exists()]
    if missing:
        parser.error(f'{args.checkout}/tests has no {", ".join(missing)}')
    stock, count = failed(args.checkout, args.folders, active=False)
    found, ran = failed(args.checkout, args.folders, active=True)
    ours = found - stock
    for name in sorted(ours):
        print(name, EXPECTED.get(name, 'NOT EXPECTED'))
    gone = [name for name in EXPECTED if name not in ours and args.folders == list(FOLDERS)]
    for name in gone:
        print(name, 'was expected to fail, and passes')
    unexpected = ours - set(EXPECTED)
    print(f'{count} tests ran without mmrepro, {len(stock)} of them fail; {ran} ran with it, '
          f'{len(ours)} more fail, {len(unexpected)} of them not expected')
    return 1 if unexpected or gone or ran != count else 0


if __name__ == '__main__':
    sys.exit(main())
