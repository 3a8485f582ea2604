"""The version, and the versions of other packages that it works with."""
from __future__ import annotations

import importlib.metadata
import re
from typing import Callable

__version__ = '0.2.0'

# distribution -> the first release that works, as in pyproject.toml; forks are not asked
REQUIRED = {'torch': (2, 0), 'numpy': (1, 24), 'mmengine': (0, 10)}


def check_versions(installed: Callable[[str], str] = importlib.metadata.version) -> None:
    """Check the versions of other packages when mmrepro is imported.

    Raises:
        ImportError: names the distribution, its version, and what is needed.
    """
    for name, needed in REQUIRED.items():
        try:
            version = installed(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found = re.match(r'(\d+)\.(\d+)', version)
        if found and tuple(map(int, found.groups())) < needed:
            raise ImportError(f'mmrepro needs {name} {".".join(map(str, needed))} or later; '
                              f'{name} {version} is installed; pip install -U {name}')
