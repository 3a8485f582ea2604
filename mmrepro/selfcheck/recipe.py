"""The recipe to build the runner of a run once more, in another process.

A recipe holds the inputs of another start of the same command: the settings as they were given,
the variables of the environment at the start, the folders that Python imports from, and the classes
that user code has registered, by module and name. Classes of the script itself are found again by
running its definitions, see :mod:`.script`.
"""
from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, NamedTuple

import mmengine.registry
import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.config.lazy import LazyAttr, LazyObject

from ..facts import collect
from ..facts.own_code import code_facts
from ..objects.walks import registries, root_registries
from ..util.files import write_whole
from ..util.libraries import is_imported_anyway
from ..util.text import qualified_name
from . import script

_PLAIN = (bool, int, float, complex, str, bytes, PurePath, type(None))
# values of torch and NumPy, and what a config of MMEngine imports when it is used
_DATA = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Tensor, np.dtype,
         np.generic, np.ndarray, LazyObject, LazyAttr)
MAX_BYTES = 1 << 10  # of a tensor or array; others belong into files
FILE = 'witness.json'  # of a run, for ``mmrepro verify WORK_DIR``
_KEPT = ('__module__', '__qualname__')  # of what another process can import by name


class NotRebuilt(Exception):
    """A run cannot be built again from what it was given; the message says why."""


class Registered(NamedTuple):
    """A class or function of the user in a registry of MMEngine."""
    registry: str  # name of the root registry in ``mmengine.registry``
    scope: str  # of the child that has it
    name: str
    target: str  # 'module:qualified name'


class Recipe(NamedTuple):
    """The inputs from which a run is built again.

    Attributes:
        runner: 'module:qualified name' of the runner's class.
        settings: arguments of the class, copied when the run was built.
        registered: what user code has put into registries until then.
        path: ``sys.path``.
        folder: the working directory.
        environment: variables when the run was built.
        script: path of the script that was started; None for a module or a notebook.
        arguments: ``sys.argv``.
        hooks: pickled pairs of a hook that was registered by code, and its priority.
        names: of what the script defines and this run needs.
        left_out: class names of hooks that cannot be pickled.
    """
    runner: str
    settings: dict[str, Any]
    registered: list[Registered]
    path: list[str]
    folder: str
    environment: dict[str, str]
    script: str | None
    arguments: list[str]
    hooks: list[bytes] = []
    names: list[str] = []
    left_out: list[str] = []


def recipe_of(cls: type, settings: Mapping[str, Any], variables: Mapping[str, str]) -> Recipe:
    """Return the recipe of a runner that is being built.

    Args:
        cls: class of the runner, as the user has named it.
        settings: its arguments, before anything changes them.
        variables: of the environment, before the run has set its own.

    Raises:
        NotRebuilt: an argument is an object; names it.
    """
    main, registered = sys.modules.get('__main__'), _registered()
    return Recipe(
        _importable(cls, 'runner'),
        {name: _copied(value, name) for name, value in settings.items()}, registered,
        list(sys.path), os.getcwd(), dict(variables), script.path_of(main), list(sys.argv),
        names=[*_of_script(cls), *_named_in(settings), *(
            entry.target.partition(':')[2].partition('.')[0]
            for entry in registered if entry.target.startswith('__main__:'))])


def _of_script(cls: type) -> list[str]:
    """Return the names of classes that the script defines, of a class and what it derives from."""
    return [base.__qualname__.partition('.')[0] for base in cls.__mro__
            if base.__module__ == '__main__']


def _named_in(settings: Any) -> Iterator[str]:
    """Yield the names of classes and functions of the script in settings: ``dict(type=Mine)``."""
    parts: Iterable[Any] = ()
    if isinstance(settings, Config):
        parts = [settings._cfg_dict]
    elif isinstance(settings, dict):
        parts = dict.values(settings)  # those of a ConfigDict would import what is lazy
    elif isinstance(settings, (list, tuple, set, frozenset)):
        parts = settings
    elif isinstance(settings, (type, FunctionType)) and settings.__module__ == '__main__':
        yield settings.__qualname__.partition('.')[0]
    for part in parts:
        yield from _named_in(part)


def with_hooks(recipe: Recipe, hooks: Sequence[Any]) -> Recipe:
    """Add hooks that code has registered; those that cannot be pickled are left out."""
    pickled = [_pickled_hook(hook) for hook in hooks]
    return recipe._replace(
        hooks=[content for content in pickled if content is not None],
        names=[*recipe.names, *(name for hook in hooks for name in _of_script(type(hook)))],
        left_out=[type(hook).__name__ for hook, content in zip(hooks, pickled) if content is None])


def _importable(thing: Any, where: str) -> str:
    """Return 'module:qualified name' of a class or function.

    Raises:
        NotRebuilt: it was defined inside a function, so that no other process can import it.
    """
    module, name = (getattr(thing, key, None) for key in _KEPT)
    if not module or not name or '<' in name:
        raise NotRebuilt(f'{where} is {thing!r}, which is defined inside a function or call: '
                         'another process cannot import it. Define it in a module')
    return f'{module}:{name}'


def _copied(value: Any, where: str) -> Any:
    """Return a copy of settings that are data.

    Raises:
        NotRebuilt: there is an object in them; names where.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Config):
        return Config(_copied(value._cfg_dict.to_dict(), where), filename=value.filename)
    if isinstance(value, ConfigDict):
        return ConfigDict({key: _copied(dict.__getitem__(value, key), f'{where}.{key}')
                           for key in dict.keys(value)})
    if isinstance(value, dict):
        return {key: _copied(item, f'{where}.{key}') for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_copied(item, f'{where}[{number}]') for number, item in enumerate(value)]
        return type(value)(items) if not hasattr(value, '_fields') else type(value)(*items)
    if isinstance(value, (type, FunctionType)):
        _importable(value, where)
        return value
    if isinstance(value, _DATA) and getattr(value, 'nbytes', 0) <= MAX_BYTES:
        return copy.deepcopy(value)
    raise NotRebuilt(f'{where} is an object of {qualified_name(type(value))}, which another '
                     'process cannot build again: give it as a dict')


def _registered() -> list[Registered]:
    """Return the importable objects that user code has registered, in order."""
    found = []
    for root, registry in root_registries().items():
        for child in registries(registry):
            for name, thing in child.module_dict.items():
                if is_imported_anyway(getattr(thing, '__module__', None) or ''):
                    continue
                with suppress(NotRebuilt):
                    found.append(Registered(root, child.scope, name, _importable(thing, name)))
    return found


def _pickled_hook(hook: Any) -> bytes | None:
    """Return a hook that code has registered, for another process; None where that cannot be."""
    with suppress(Exception):  # whatever an object raises that is not to be pickled
        content = pickle.dumps((hook, hook.priority))
        return content if len(content) < 1 << 20 else None
    return None


def write(path: str, recipe: Recipe | str, config: str, hooks: list[str], first: int) -> None:
    """Write the file from which ``mmrepro verify WORK_DIR`` builds a run again.

    Args:
        recipe: of the run, or why there is none.
        config: name of the config file that MMEngine has written into the work directory.
        hooks: names of hooks that were registered by code.
        first: iteration that came first, counted from 0.
    """
    known = recipe._asdict() if isinstance(recipe, Recipe) else {}
    known['arguments'] = collect.command(known.get('arguments', []))  # without secrets
    write_whole(path, json.dumps(dict(
        {name: known.get(name, default) for name, default in (
            ('runner', ''), ('registered', []), ('path', []), ('folder', ''), ('script', None),
            ('arguments', []), ('names', []))},
        config=config, hooks=hooks, first=first, code=code_facts(),
        not_rebuilt=recipe if isinstance(recipe, str) else ''), indent=1))


# ------------------------------------------------------------------------- in the other process

def enter(path: list[str], folder: str, arguments: list[str]) -> None:
    """Let this process import the same modules as the process of the recipe."""
    os.chdir(folder)
    sys.path[:] = path
    sys.argv[:] = arguments


def prepare(recipe_script: str | None, registered: list[Registered], names: list[str]
            ) -> list[str]:
    """Import the modules of registered classes and register them.

    Returns:
        Why some are missing, as lines.
    """
    needed = {entry.target.partition(':')[0] for entry in registered}
    problems = []
    if names:
        if recipe_script is None:
            problems.append('classes of a notebook or of an interactive session: move them to a '
                            'module')
        else:
            script.run_definitions(recipe_script, names)
    for module in sorted(needed - {'__main__'}):
        try:
            importlib.import_module(module)
        except Exception as error:  # raised by code of the user
            problems.append(f'{module}: {type(error).__name__}: {error}')
    for entry in registered:
        _register(entry)
    return problems


def _register(entry: Registered) -> None:
    """Put a class into its registry, unless the import has done so."""
    root = getattr(mmengine.registry, entry.registry)
    target = next((child for child in registries(root) if child.scope == entry.scope), root)
    with suppress(ImportError, AttributeError):  # the build names a class that is missing
        thing = resolve_name(entry.target)
        if target.module_dict.get(entry.name) is not thing:
            target._module_dict[entry.name] = thing
