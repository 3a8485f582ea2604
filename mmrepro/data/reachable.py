"""What a dataset, a transform or a function reaches: attributes, closures, globals that it names.

Names of paths are the same in all processes of a run: they are part of a generator's key.
"""
from __future__ import annotations

import functools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState,
              random.Random)
MAX_ITEMS = 64  # of a list or dict: longer ones are annotations
Named = tuple[str, Any]  # path, value

# packages whose functions keep no generators for transforms; beside the standard library
_LIBRARIES = frozenset((
    'PIL', 'albumentations', 'cv2', 'matplotlib', 'mmcv', 'mmdet', 'mmengine', 'mmrepro', 'numpy',
    'pycocotools', 'scipy', 'skimage', 'sklearn', 'torch', 'torchvision'))
_STANDARD = sysconfig.get_paths()['stdlib']


@functools.lru_cache(maxsize=1 << 14)
def belongs_to_user(module: str) -> bool:
    """Whether a module is none of the libraries that every training has."""
    top = (module or '').partition('.')[0]
    if top in _LIBRARIES or top in sys.builtin_module_names:
        return False
    file = getattr(sys.modules.get(top), '__file__', None) or ''
    return not file.startswith(_STANDARD) or 'site-packages' in file


def _module(name: Any) -> str:
    # the script that was started: a spawned worker imports it by the second name
    return '__main__' if name == '__mp_main__' else str(name)


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """The code of a function and of those defined in it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        yield code


def _used_globals(function: types.FunctionType) -> Iterator[Named]:
    """Generators, and functions of the same module, that a function names."""
    for code in _codes(function):
        for name in code.co_names:
            value = function.__globals__.get(name)
            own = isinstance(value, types.FunctionType) and \
                value.__globals__ is function.__globals__
            if own or isinstance(value, GENERATORS):
                yield f'{_module(function.__module__)}:{name}', value


def named_globals(function: types.FunctionType) -> dict[str, Any]:
    """All globals that a function names, and what it names in the user's modules among them."""
    names = list(dict.fromkeys(name for code in _codes(function) for name in code.co_names))
    found: dict[str, Any] = {}
    waiting = deque([(_module(function.__module__), function.__globals__)])
    looked_at = {id(function.__globals__)}
    while waiting:
        module, namespace = waiting.popleft()
        for name in names:
            value = namespace.get(name)
            if isinstance(value, types.ModuleType):
                if belongs_to_user(value.__name__) and id(vars(value)) not in looked_at:
                    looked_at.add(id(vars(value)))
                    waiting.append((_module(value.__name__), vars(value)))
            elif name in namespace:
                found[f'{module}:{name}'] = value
    return found


def _inside_function(function: types.FunctionType, path: str) -> Iterator[Named]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield f'{path}.{name}', cell.cell_contents
        except ValueError:  # a name that was never bound
            continue
    yield from ((f'{path}.default{i}', value)
                for i, value in enumerate(function.__defaults__ or ()))
    yield from _used_globals(function)


def _inside_object(thing: Any, path: str) -> Iterator[Named]:
    for name, value in vars(thing).items():
        yield f'{path}.{name}', value
    for cls in type(thing).__mro__[:-1]:
        for name, value in vars(cls).items():
            if isinstance(value, GENERATORS):
                yield f'{path}.{name}', value
            elif isinstance(value, types.FunctionType):
                yield from _used_globals(value)


def inside(thing: Any, path: str) -> Iterable[Named]:
    """What a thing holds."""
    if isinstance(thing, types.FunctionType):
        return _inside_function(thing, path)
    if isinstance(thing, (types.MethodType, types.BuiltinMethodType)):
        return [(path, thing.__self__), (path, getattr(thing, '__func__', None))]
    if isinstance(thing, functools.partial):
        return [(path, thing.func), (f'{path}.args', thing.args),
                (f'{path}.keywords', thing.keywords)]
    if isinstance(thing, dict):
        return [(f'{path}[{key!r}]', value) for key, value in thing.items()] \
            if len(thing) <= MAX_ITEMS else ()
    if isinstance(thing, (list, tuple, deque)):
        return [(f'{path}[{i}]', value) for i, value in enumerate(thing)] \
            if len(thing) <= MAX_ITEMS else ()
    return _inside_object(thing, path) if hasattr(thing, '__dict__') else ()


# what `hidden` and `inside` do not look into, unless it is a class or an object of the user
_CONTAINERS = (list, tuple, dict, deque)


def hidden(thing: Any, path: str) -> Iterator[Named]:
    """What a thing reaches beside what it holds: through decorators, methods of any kind, slots,
    class attributes, and what its functions name in other modules of the user."""
    if isinstance(thing, types.FunctionType):
        yield from ((f'{path}.{name}', value) for name, value in vars(thing).items())
        yield from ((f'{path}.{name}', value)
                    for name, value in (thing.__kwdefaults__ or {}).items())
        yield from (one for one in named_globals(thing).items() if _can_hold(one[1]))
    elif isinstance(thing, (staticmethod, classmethod)):
        yield path, thing.__func__
    elif isinstance(thing, property):
        yield from ((path, one) for one in (thing.fget, thing.fset, thing.fdel) if one)
    elif isinstance(thing, type):
        yield from _class_attributes(thing, path)
    elif not isinstance(thing, _CONTAINERS):
        yield from ((f'{path}.{name}', getattr(thing, name)) for name in slots(thing))
        for cls in type(thing).__mro__[:-1]:
            yield from _class_attributes(cls, path)


def _class_attributes(cls: type, path: str) -> list[Named]:
    if not belongs_to_user(cls.__module__):
        return []
    return [(f'{path}.{name}', value) for name, value in vars(cls).items()
            if name not in ('__dict__', '__weakref__')]


def _can_hold(value: Any) -> bool:
    """Whether a global is, or may hold, a generator of the user."""
    if isinstance(value, (*GENERATORS, *_CONTAINERS)) or hasattr(value, '__wrapped__'):
        return True
    if isinstance(value, (type, types.FunctionType)):
        return belongs_to_user(value.__module__)
    return belongs_to_user(type(value).__module__)


def slots(thing: Any) -> list[str]:
    """Names of the attributes that an object has in slots."""
    found: list[str] = []
    for cls in type(thing).__mro__:
        names = vars(cls).get('__slots__', ())
        found += (names, ) if isinstance(names, str) else names
    return [name for name in found if name not in ('__dict__', '__weakref__')
            and hasattr(thing, name)]
