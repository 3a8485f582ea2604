"""Which code is a library, and which is the user's.

There are two answers. By the name of a module: :func:`belongs_to_user` is quick, and knows the
libraries that every training has. By its file: :func:`is_own` reads what installed distributions
list. A file belongs to the distribution that lists it. So an editable install, a folder on the
path, a file that somebody has put into ``site-packages``, and one that was edited there are own
code.
"""
from __future__ import annotations

import base64
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

_STANDARD = tuple({os.path.join(sysconfig.get_path(name), '') for name in ('stdlib', 'platstdlib')})
SITES = ('site-packages', 'dist-packages')  # folders into which distributions are installed
# virtualenv and uv put it there when they make an environment; no distribution lists it
_OF_THE_ENVIRONMENT = ('_virtualenv.py', )
SLACK = 2  # seconds by which a file may be newer than the list of a finished installation
# distributions with the same code as the one after which the module is called
_SAME_CODE = {'mmengine-lite', 'mmcv-lite', 'opencv-python-headless', 'opencv-contrib-python',
              'opencv-contrib-python-headless', 'opencv-python', 'pillow'}

_FIELD = re.compile(r'^(Name|Version): *(.*\S)', re.MULTILINE)  # of a distribution's metadata

# packages whose code was read for docs/reference/causes.md, or that an audit leaves alone
_STOCK = frozenset((
    'albumentations', 'builtins', 'mmcls', 'mmcv', 'mmdet', 'mmengine', 'mmpretrain', 'mmrepro',
    'numpy', 'timm', 'torch', 'torchvision', 'transformers'))
# packages that every training has, with those of transforms and metrics
_LIBRARIES = frozenset((
    'PIL', 'albumentations', 'cv2', 'matplotlib', 'mmcv', 'mmdet', 'mmengine', 'mmrepro', 'numpy',
    'pycocotools', 'scipy', 'skimage', 'sklearn', 'torch', 'torchvision'))
# packages that a run has imported, whatever its config says
_IMPORTED = frozenset(('builtins', 'mmcv', 'mmdet', 'mmengine', 'mmrepro', 'torch'))
# packages whose objects hold state of the process, not of the training
_PROCESS = frozenset((
    'builtins', 'enum', 'functools', 'logging', 'matplotlib', 'mmengine', 'mmrepro',
    'multiprocessing', 'numpy', 'pathlib', 'queue', 're', 'threading', 'torch', 'types', 'weakref'))
# mmrepro itself, wherever this module is in it
PACKAGE = os.path.join(os.path.dirname(os.path.abspath(str(
    sys.modules[__name__.partition('.')[0]].__file__))), '')
# files that read the clock, or ask for entropy, all the time: for logs, timers and names
_MACHINERY = ('/logging/', '/mmengine/logging/', '/mmengine/hooks/', '/mmengine/utils/',
              '/threading.py', '/queue.py', '/selectors.py', '/abc.py', '/torch/autograd/',
              '/torch/_', '/torch/utils/_', '/torch/nn/modules/module.py', PACKAGE,
              '/multiprocessing/', '/tempfile.py', '/copy.py', '/weakref.py')


@functools.lru_cache(maxsize=1 << 14)
def belongs_to_user(module: str | None) -> bool:
    """Whether a module is none of the libraries that every training has."""
    top = (module or '').partition('.')[0]
    if top in _LIBRARIES or top in sys.builtin_module_names:
        return False
    return not is_standard(getattr(sys.modules.get(top), '__file__', None) or '')


def is_stock(module: str) -> bool:
    """Whether a module belongs to OpenMMLab, or to what its models are built of."""
    return module.partition('.')[0] in _STOCK


def is_imported_anyway(module: str) -> bool:
    """Whether a module is of a package that every run imports, whatever its config says."""
    return module.partition('.')[0] in _IMPORTED


def holds_process_state(module: str) -> bool:
    """Whether objects of a module's classes hold state of the process, not of the training."""
    return module.partition('.')[0] in _PROCESS


def is_machinery(file: str) -> bool:
    """Whether calls of a file for the clock, entropy or threads affect no value of a training."""
    return any(part in file for part in _MACHINERY)


class Distribution(NamedTuple):
    """An installed distribution."""
    name: str  # in lower case, with hyphens
    version: str


def name_and_version(installed: importlib.metadata.Distribution) -> tuple[str | None, str]:
    """Return the name and the version of a distribution; None and '' without metadata.

    Its property ``metadata`` parses the description as well, a whole page.
    """
    text = next(filter(None, map(installed.read_text, ('METADATA', 'PKG-INFO', ''))), '')
    head, _, _ = text.partition('\n\n')
    fields = dict(_FIELD.findall(head))
    return fields.get('Name'), fields.get('Version', '')


class _Installed:
    """A distribution with what it has put into its folder."""

    def __init__(self, metadata: importlib.metadata.Distribution) -> None:
        self._metadata = metadata
        self.folder = os.path.abspath(str(metadata.locate_file('')))
        record = metadata.read_text('RECORD')
        self._lines = None if record is None else record.splitlines()

    @property
    def is_checkout(self) -> bool:
        """Whether the folder is one of sources, with metadata that a build has left there."""
        return self._lines is None and not set(SITES) & set(self.folder.split(os.sep))

    @functools.cached_property
    def distribution(self) -> Distribution:
        name, version = name_and_version(self._metadata)
        return Distribution(re.sub('[-_.]+', '-', name or 'unknown').lower(), version)

    @functools.cached_property
    def files(self) -> dict[str, tuple[str, str]]:
        """Path in the folder -> digest and size, '' where they were not recorded."""
        found = {}
        for line in self._lines or ():
            path, _, rest = line.rpartition(',')
            path, _, digest = path.rpartition(',')
            found[path.strip('"')] = digest, rest
        return found

    @functools.cached_property
    def _completed(self) -> float:
        """When the installation ended: what was edited after that is newer."""
        lists = [path for path in self.files if path.endswith('.dist-info/RECORD')]
        try:
            return max(os.stat(os.path.join(self.folder, path)).st_mtime for path in lists)
        except (OSError, ValueError):
            return 0

    def is_unchanged(self, path: str) -> bool:
        """Whether a Python file has the content with which it was installed.

        Only one that is newer than the list, or has another size, is read: reading all takes
        seconds where the files lie on a network.
        """
        digest, size = self.files.get(path, ('', ''))
        algorithm, _, wanted = digest.partition('=')
        if algorithm != 'sha256' or not path.endswith('.py'):
            return True
        file = os.path.join(self.folder, path)
        try:
            status = os.stat(file)
            if str(status.st_size) == size and status.st_mtime <= self._completed + SLACK:
                return True
            with open(file, 'rb') as opened:
                found = hashlib.sha256(opened.read()).digest()
        except OSError:  # of a zip file
            return True
        return base64.urlsafe_b64encode(found).rstrip(b'=').decode() == wanted

    def tops(self) -> set[str]:
        """Return the first parts of the paths; of an old kind of install, its modules."""
        if self._lines is not None:
            return {line.lstrip('"').partition(',')[0].partition('/')[0] for line in self._lines}
        listed = (self._metadata.read_text('top_level.txt') or '').split()
        return {name for top in listed for name in (top, f'{top}.py')}

    def lists(self, path: str) -> bool:
        return self._lines is None or path in self.files


class _Index:
    """The distributions of an entry of the path, by folder and by what they have put into it."""

    def __init__(self, entry: str) -> None:
        self.folders: dict[str, dict[str, list[_Installed]]] = defaultdict(
            lambda: defaultdict(list))
        for metadata in importlib.metadata.distributions(path=[entry]):
            installed = _Installed(metadata)
            if installed.is_checkout:
                continue
            for top in installed.tops():
                self.folders[installed.folder][top].append(installed)

    def owners(self, file: str) -> Iterator[tuple[_Installed, str]]:
        """Yield the distributions that list a file, with its path in their folder."""
        for folder, tops in self.folders.items():
            if file.startswith(folder + os.sep):
                path = file[len(folder) + 1:].replace(os.sep, '/')
            elif '..' in tops and not file.endswith('.py'):  # a command, as bin/torchrun
                path = os.path.relpath(file, folder).replace(os.sep, '/')
            else:
                continue
            for installed in tops.get(path.partition('/')[0], ()):
                if installed.lists(path):
                    yield installed, path


# an entry is read once, however often a program changes its path
_index = functools.lru_cache(maxsize=256)(_Index)


@functools.lru_cache(maxsize=1 << 14)
def is_standard(file: str) -> bool:
    """Whether a file is one of the standard library, or of the interpreter itself."""
    return file.startswith('<frozen') or (
        file.startswith(_STANDARD) and not set(SITES) & set(file.split(os.sep)))


def providers(file: str) -> list[Distribution]:
    """Return the distributions that list a file and have it as it is on disk."""
    return _providers(file, tuple(sys.path))


@functools.lru_cache(maxsize=1 << 14)
def _providers(file: str, path: tuple[str, ...]) -> list[Distribution]:
    for follow in (str, os.path.realpath):
        named = follow(file)
        owners = [owner for entry in dict.fromkeys(path) for owner in _index(entry).owners(named)]
        if owners:
            return [installed.distribution for installed, listed in owners
                    if installed.is_unchanged(listed)]
    return []


def is_own(file: str) -> bool:
    """Whether a file is neither of the standard library nor of an installed distribution."""
    return not is_standard(file) and os.path.basename(file) not in _OF_THE_ENVIRONMENT \
        and not providers(file)


@functools.lru_cache(maxsize=1 << 14)
def is_code_of_user(module: str, file: str) -> bool:
    """Whether a module belongs to the user, and its file is not installed."""
    return belongs_to_user(module) and not file.startswith(PACKAGE) and is_own(file)


def file_of(module: Any) -> str | None:
    """Return the file that an imported module comes from; None for one that is built in."""
    file = getattr(module, '__file__', None)
    return file if isinstance(file, str) and os.path.isabs(file) else None


def version_of(module: str) -> str | None:
    """Return the version of the distribution that provides a module; None if there is none.

    A distribution of another name, such as a fork, is named: ``'mmdet-open 3.3.0'``. The version
    of an imported module that no distribution provides is its ``__version__``.
    """
    loaded = sys.modules.get(module)
    file = file_of(loaded)
    if loaded is None:
        spec = importlib.machinery.PathFinder.find_spec(module)
        file = None if spec is None else spec.origin
    found = providers(file) if file else []
    own = getattr(loaded, '__version__', None)
    if not found:
        return None if own is None else str(own)
    texts = {_version(module, each, None if own is None else str(own)) for each in found}
    return ', '.join(sorted(texts))


def _version(module: str, distribution: Distribution, own: str | None) -> str:
    same = distribution.name == module.lower().replace('_', '-') or distribution.name in _SAME_CODE
    # the module's own version is more exact: 2.1.0+cpu
    return (own or distribution.version) if same else f'{distribution.name} {distribution.version}'


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
