"""Call a function when a module is imported: at once, or right after the import that comes later.

Importing this module imports nothing else.
"""
from __future__ import annotations

import importlib.abc
import sys
from types import ModuleType
from typing import Any, Callable

Action = Callable[[ModuleType], None]

_waiting: dict[str, list[Action]] = {}  # module -> actions after each import of it


def after_import(module: str, action: Action) -> None:
    """Call ``action(module)`` now, if the module is imported already, and after its next import.

    An action that is waiting is not added again.
    """
    actions = _waiting.setdefault(module, [])
    if action not in actions:
        actions.append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if sys.modules.get(module) is not None:
        action(sys.modules[module])


def forget(module: str, action: Action) -> None:
    """Cancel :func:`after_import`. Effects of earlier calls of the action stay."""
    actions = _waiting.get(module, [])
    if action in actions:
        actions.remove(action)
    if not actions:
        _waiting.pop(module, None)
    if not _waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _Loader(importlib.abc.Loader):
    """Runs a module with its own loader, then calls the actions that wait for it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in tuple(_waiting.get(module.__name__, ())):
            action(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module with the other finders, and wraps its loader."""

    def __init__(self) -> None:
        self._asking: set[str] = set()  # modules that other finders are asked for

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _waiting or fullname in self._asking:
            return None
        self._asking.add(fullname)
        try:
            return self._wrapped(fullname, path, target)
        finally:
            self._asking.discard(fullname)

    def _wrapped(self, fullname: str, path: Any, target: Any) -> Any:
        # another finder of this kind asks in turn: `_mmrepro_operators` has a copy of this module
        for finder in tuple(sys.meta_path):
            find = None if finder is self else getattr(finder, 'find_spec', None)
            spec = find(fullname, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:  # a namespace package has none
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


_finder = _Finder()
