"""Own code of a run: the imported files that belong to no library, with a digest of each.

Whether git tracks a file does not matter. A file is read when it is first looked at, as early as
the run is built, because Python keeps no source of what it has loaded.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..distributed.agreement import MODULES
from ..util import libraries

PREFIX = 'source.'  # of the names of facts
STARTED = f'{PREFIX}started:'  # of the script that was started
MMREPRO = f'{PREFIX}mmrepro'  # a digest of all files: recorded in every run
NOT_RECORDED = 'not recorded'
# modules that have a fact of their own: what trains, then what decodes and transforms images
TRANSFORMS = ('cv2', 'PIL', 'albumentations', 'pycocotools')
NAMED = (*MODULES, *TRANSFORMS)
DIGITS = 16  # of a digest in a fact, in hexadecimal

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# with the module that provides operators where mmrepro is not imported
_OURS = os.path.join(_PACKAGE, ''), os.path.join(os.path.dirname(_PACKAGE), '_mmrepro_')
MOST_COPIED = 5000  # files of a run's packages; of larger ones, what was imported


class Source(NamedTuple):
    """A file that was imported."""
    module: str
    file: str  # path; '' for what was typed
    sha256: str  # NOT_RECORDED for what was typed

    @property
    def fact(self) -> str:
        return self.sha256 if self.sha256 == NOT_RECORDED else self.sha256[:DIGITS]


# name of a file as in `sources` -> what tells a module from one that was loaded again, and its file
_seen: dict[str, tuple[Any, Source]] = {}
_looked_at: set[str] = set()  # modules
_versions: dict[str, set[str]] = defaultdict(set)  # of distributions


def _look() -> None:
    """Look at the modules that were imported since the last look, and at own ones again."""
    own = {source.module for _, source in _seen.values()}
    for module in {*sys.modules} - _looked_at | own:
        loaded = sys.modules.get(module)
        file = libraries.file_of(loaded)
        _looked_at.add(module)
        named = None
        if module == '__main__':
            named = _started(loaded)
        # '__mp_main__' is a worker's name of the script
        elif file and module != '__mp_main__' and not (
                file.startswith(_OURS) or libraries.is_standard(file)):
            for distribution in libraries.providers(file):
                _versions[distribution.name].add(distribution.version)
            if libraries.is_own(file):
                named = _name(module, file), file
        if named is not None:
            _note(module, loaded, *named)


def _note(module: str, loaded: Any, name: str, file: str) -> None:
    mark = getattr(loaded, '__spec__', None) or loaded
    if name not in _seen or _seen[name][0] is not mark:
        digest = _digest(file, getattr(loaded, '__loader__', None))
        if digest:
            _seen[name] = mark, Source(module, file, digest)


def sources() -> dict[str, Source]:
    """Return the own files that are imported by now, mmrepro's left out.

    The names are those of modules as paths, ``'package/module.py'``, wherever the package lies;
    that of the script is ``'started:train.py'``.
    """
    _look()
    return {name: _seen[name][1] for name in sorted(_seen)}


def _name(module: str, file: str) -> str:
    """Return the path of a module below the folder from which it is imported."""
    base = os.path.basename(file)
    inner = ('__init__', ) if base.startswith('__init__.') else ()
    return '/'.join([*module.split('.'), *inner]) + os.path.splitext(base)[1]


def _started(main: Any) -> tuple[str, str] | None:
    """Return name and file of the script; None for commands of mmrepro and of libraries."""
    file = getattr(main, '__file__', None)
    if not isinstance(file, str):
        given = getattr(sys, 'orig_argv', sys.argv)
        return f'started:{"-c" if "-c" in given else "a prompt or notebook"}', ''
    file = os.path.abspath(file)
    if file.startswith(_OURS) or not libraries.is_own(file):
        return None
    spec = getattr(main, '__spec__', None)  # python -m package.module
    return f'started:{_name(spec.name, file) if spec else os.path.basename(file)}', file


def _digest(file: str, loader: Any = None) -> str:
    """Return the SHA-256 of a file, or of the text after ``python -c``; '' if it has no file."""
    if not file:
        given = list(getattr(sys, 'orig_argv', ()))
        if '-c' not in given:
            return NOT_RECORDED
        return hashlib.sha256(given[given.index('-c') + 1].encode()).hexdigest()
    content = _content(file, loader)
    return '' if content is None else hashlib.sha256(content).hexdigest()


def _content(file: str, loader: Any = None) -> bytes | None:
    """Return the content of a file, which may lie in a zip file; None if there is no such file."""
    try:
        with open(file, 'rb') as opened:
            return opened.read()
    except OSError:
        pass
    try:
        return bytes(loader.get_data(file))
    except (AttributeError, OSError, ValueError):
        return None


@functools.cache
def mmrepro_files() -> dict[str, str]:
    """Return digests of mmrepro's Python files, and of its tables but for measurements in JSON."""
    found = {}
    for folder, _, names in os.walk(_PACKAGE):
        for name in names:
            if name.endswith(('.py', '.csv', '.ini')):
                path = os.path.join(folder, name)
                found[os.path.relpath(path, os.path.dirname(_PACKAGE))] = _digest(path)
    return dict(sorted(found.items()))


def files() -> dict[str, str]:
    """Return digests of all own files and of mmrepro's, for the comparison of ranks."""
    return {**mmrepro_files(), **{name: source.fact for name, source in sources().items()}}


def versions() -> dict[str, str]:
    """Return the versions of the distributions that are imported, without those of `NAMED`."""
    _look()
    named = set()
    for module in NAMED:
        file = libraries.file_of(sys.modules.get(module))
        if file:
            named |= {distribution.name for distribution in libraries.providers(file)}
    return {name: ', '.join(sorted(_versions[name])) for name in sorted(_versions)
            if name not in named}


def code_facts() -> dict[str, Any]:
    """Return the facts on all code that is imported by now: own files, and versions of the rest.

    Modules whose versions all ranks compare have their facts by then.
    """
    text = ''.join(f'{name} {digest}\n' for name, digest in mmrepro_files().items())
    facts: dict[str, Any] = {MMREPRO: hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}
    facts.update((f'{PREFIX}{name}', source.fact) for name, source in sources().items())
    facts.update((f'version.{module}', libraries.version_of(module))
                 for module in TRANSFORMS if module in sys.modules)
    facts.update((f'version.{name}', version)
                 for name, version in versions().items())
    return facts


def script_fact(path: str | None) -> dict[str, str]:
    """Return the fact on a script whose definitions another process has run once more."""
    digest = _digest(path)[:DIGITS] if path else ''
    return {f'{STARTED}{os.path.basename(path)}': digest} if path and digest else {}


def edited(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the own files in both facts that have changed in between."""
    return sorted(name[len(PREFIX):] for name in then.keys() & now.keys()
                  if name.startswith(PREFIX) and then[name] != now[name])


def completed(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``now`` with what ``then`` has and this process has not imported yet.

    A file is looked for where an import would find it, and a version where it is installed.
    """
    found = dict(now)
    for name in then:
        if name in now:
            continue
        if name.startswith(PREFIX) and not name.startswith(STARTED) and MMREPRO in now:
            digest = _digest_on_path(name[len(PREFIX):])
            found.update({name: digest[:DIGITS]} if digest else {})
        elif name.startswith('version.'):
            module = name[len('version.'):]
            version_of = libraries.version_of if module in NAMED else libraries.installed_version
            version = version_of(module)
            found.update({name: version} if version else {})
    return found


def _digest_on_path(name: str) -> str:
    """Return the digest of the file that an import would load; '' where there is none."""
    parts = os.path.splitext(name)[0].split('/')
    modules = parts[:-1] if parts[-1] == '__init__' else parts
    path, spec = None, None
    for number in range(len(modules)):
        module = '.'.join(modules[:number + 1])
        spec = next((spec for finder in tuple(sys.meta_path) if hasattr(finder, 'find_spec')
                     for spec in [finder.find_spec(module, path)] if spec is not None), None)
        if spec is None:
            return ''
        # a package may have changed it
        path = getattr(sys.modules.get(module), '__path__', spec.submodule_search_locations)
    if spec is None or not spec.origin or os.path.splitext(spec.origin)[1] != \
            os.path.splitext(name)[1]:
        return ''
    return _digest(spec.origin, spec.loader)


def write_copies(path: str, clean: Callable[[str], str]) -> None:
    """Write a zip file with the own files, and with the other Python files of their packages.

    A repetition may import these, and half a package would hide the whole one. A file that was
    edited since it was digested is left out.

    Args:
        clean: removes secrets from the text of a Python file.
    """
    found = sources()
    wanted = {name: (source.file, source.sha256) for name, source in found.items() if source.file}
    beside = {name: (file, '') for name, file in _beside(found) if name not in wanted}
    if len(beside) > MOST_COPIED:
        beside = {}
    content = io.BytesIO()
    with zipfile.ZipFile(content, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, (file, sha256) in sorted({**wanted, **beside}.items()):
            data = _content(file)
            if data is None or sha256 and hashlib.sha256(data).hexdigest() != sha256:
                continue
            if name.endswith('.py'):
                with contextlib.suppress(UnicodeDecodeError):
                    data = clean(data.decode()).encode()
            # without the time, so that equal code gives equal files
            archive.writestr(zipfile.ZipInfo(name.replace(':', '/')), data, zipfile.ZIP_DEFLATED)
    with open(path, 'wb') as written:
        written.write(content.getvalue())


def _beside(found: Mapping[str, Source]) -> Iterator[tuple[str, str]]:
    """Yield name and path of all Python files in the packages of own files."""
    for top in sorted({source.module.partition('.')[0] for source in found.values()}):
        for root in getattr(sys.modules.get(top), '__path__', ()):
            for folder, folders, names in os.walk(root):
                folders[:] = [name for name in folders if not name.startswith(('.', '__pycache__'))]
                for name in names:
                    if name.endswith('.py'):
                        path = os.path.join(folder, name)
                        yield os.path.join(top, os.path.relpath(path, root)), path
