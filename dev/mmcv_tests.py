"""Run mmcv's own tests of its operators with mmrepro's operators: none may fail.

    git clone -b v2.1.0 https://github.com/open-mmlab/mmcv
    python dev/mmcv_tests.py mmcv

The installed mmcv is tested, mmcv-lite or a compiled one; of the checkout only the tests are used.
mmcv itself skips those that need another device. Takes a minute and needs the packages of
``requirements/test.txt``.
"""
from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dev.mmengine_tests import run_pytest  # noqa: E402

_START = """import sys
from mmrepro import ops
ops.use('torch')
import pytest
sys.exit(pytest.main(sys.argv[1:]))"""


def failed(checkout: Path) -> tuple[set[str], int]:
    """Return the tests of ``checkout`` that fail, and the number of tests that ran."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    with tempfile.TemporaryDirectory() as folder:
        # beside the package mmcv of the checkout, that one would be tested
        shutil.copytree(checkout / 'tests', Path(folder, 'tests'))
        return run_pytest([sys.executable, '-c', _START], ['tests/test_ops'], Path(folder),
                          {'PYTHONPATH': path})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkout', type=Path, help='a checkout of mmcv')
    args = parser.parse_args()
    if not (args.checkout / 'tests' / 'test_ops').is_dir():
        parser.error(f'{args.checkout} has no folder tests/test_ops')
    found, ran = failed(args.checkout)
    for name in sorted(found):
        print(name)
    print(f'{ran} tests ran, {len(found)} of them fail')
    return 1 if found or not ran else 0


if __name__ == '__main__':
    sys.exit(main())
