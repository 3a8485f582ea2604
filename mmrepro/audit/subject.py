"""The subject of an audit: a config, its types and their files, read without a run."""
from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from mmengine import registry
from mmengine.config import Config

from ..config import RandomnessConfig, randomness_of
from ..errors import RandomnessError
from ..objects.walks import named_dicts
from ..runs.config_edits import import_mmrepro, imports_of
from ..util.libraries import belongs_to_user, is_stock
from ..util.text import class_name
from .findings import TWO_LINES
from .running_code import hits_of
from .sources import Hit, SourceFile

# what a training step depends on
TRAIN_KEYS = ('model', 'train_dataloader', 'train_cfg', 'optim_wrapper', 'custom_hooks',
              'default_hooks', 'param_scheduler')


class Part(NamedTuple):
    """A dict of the config that names a type."""
    key: str  # where it is in the config, as in train_dataloader.dataset.pipeline[2]
    name: str  # the type's bare name
    node: Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """A config and the machine it would run on."""
    cfg: Config  # complete
    device: str = 'cpu'  # or 'cuda'
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    lazy: bool = False  # a pure-Python config, whose custom_imports MMEngine does not run
    failed_import: str = ''  # message of the import of custom_imports that did not work

    @cached_property
    def imports(self) -> list[str]:
        """Modules in ``custom_imports``."""
        return imports_of(self.cfg)

    @cached_property
    def attached(self) -> bool:
        """Whether mmrepro's runner would run this config."""
        if class_name(self.cfg.get('runner_type') or '') == 'ReproRunner':
            return True
        if self.lazy:
            return False
        return any(name.partition('.')[0] == 'mmrepro' for name in self.imports) or any(
            source.imports('mmrepro') for source in self.sources)

    @cached_property
    def _parsed(self) -> tuple[RandomnessConfig, str]:
        try:
            return randomness_of(self.cfg), ''
        except RandomnessError as error:
            return RandomnessConfig(), str(error)

    @property
    def randomness(self) -> RandomnessConfig:
        """The config's randomness; defaults where it is not valid."""
        return self._parsed[0]

    @property
    def randomness_error(self) -> str:
        return self._parsed[1]

    @property
    def keyed(self) -> bool:
        """Samples have streams of their own, and MMDetection's parts are replaced."""
        return self.attached and not self.randomness.uses_stock_streams

    @property
    def is_deterministic(self) -> bool:
        """Determinism is in force as mmrepro sets it."""
        return self.attached and self.randomness.deterministic is True

    def with_two_lines(self) -> Subject:
        """Return the same config with mmrepro's two lines."""
        return self._attaching(self.lazy, randomness=copy.deepcopy(TWO_LINES['randomness']),
                               runner_type='mmrepro.ReproRunner')

    def under_our_train(self) -> Subject:
        """Return the same config as `mmrepro train` would start it."""
        return self._attaching(lazy=False)

    def _attaching(self, lazy: bool, **settings: Any) -> Subject:
        cfg = copy.deepcopy(self.cfg)
        cfg.update(settings)
        import_mmrepro(cfg)
        subject = replace(self, cfg=cfg, lazy=lazy)
        known = ('sources', 'hits')
        subject.__dict__.update({name: self.__dict__[name] for name in known
                                 if name in self.__dict__})
        return subject

    @property
    def world_size(self) -> int:
        """Number of ranks if the launcher has said it already, else 1."""
        text = self.env.get('WORLD_SIZE', '')
        return int(text) if text.isdigit() else 1

    @cached_property
    def parts(self) -> list[Part]:
        """Every dict with a ``type``, in the order of the file."""
        # Config hides its dict, and lazy configs give classes: both come out as plain dicts here
        return [Part(key, class_name(node['type']), node)
                for key, node in named_dicts(self.cfg._cfg_dict) if node.get('type') is not None]

    def parts_in(self, *keys: str) -> list[Part]:
        """Return the parts under one of the top-level keys."""
        return [part for part in self.parts if part.key.partition('.')[0].partition('[')[0] in keys]

    @cached_property
    def scope(self) -> str:
        """The default scope, with its registries imported."""
        scope = self.cfg.get('default_scope') or 'mmengine'
        if scope not in ('mmengine', 'mmrepro'):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f'{scope}.registry')
        return scope

    def class_of(self, part: Part) -> type | None:
        """Return the class that a part would be built from; None if no registry knows it."""
        kind = part.node['type']
        if not isinstance(kind, str):
            return kind if isinstance(kind, type) else None
        key = kind, part.node.get('_scope_', self.scope)
        if key not in self._classes:  # a type that no registry has takes long
            self._classes[key] = _look_up(*key)
        return self._classes[key]

    @cached_property
    def _classes(self) -> dict[tuple[str, str], type | None]:
        return {}

    @cached_property
    def sources(self) -> tuple[SourceFile, ...]:
        """The user's files: ``custom_imports``, and classes that the config names."""
        paths: set[str] = set()
        for name in self.imports:
            if not is_stock(name):
                paths.update(_files_of(name))
        for cls in filter(None, map(self.class_of, self.parts)):
            for base in cls.__mro__:
                path = getattr(sys.modules.get(base.__module__), '__file__', None)
                if path and belongs_to_user(base.__module__) and not is_stock(base.__module__):
                    paths.add(path)
        return tuple(SourceFile.read(path) for path in sorted(paths) if path.endswith('.py'))

    @cached_property
    def hits(self) -> tuple[tuple[SourceFile, Hit], ...]:
        """The lines of the user's files that rules are about, each with its file."""
        patterns = tuple((source, hit) for source in self.sources for hit in source.hits)
        return patterns + hits_of(self.sources)


def _look_up(kind: str, scope: str) -> type | None:
    """Return the class that a registry of MMEngine knows by this name; None without one."""
    for table in vars(registry).values():
        for name in (kind, ) if '.' in kind else (f'{scope}.{kind}', kind):
            # errors: a scope whose package is not installed
            with contextlib.suppress(ImportError, AttributeError, KeyError, AssertionError):
                cls = table.get(name) if isinstance(table, registry.Registry) else None
                if isinstance(cls, type):
                    return cls
    return None


def _files_of(name: str) -> list[str]:
    """Return the files of a module and its imported submodules, or of a module on the path."""
    if name in sys.modules:
        files = [getattr(module, '__file__', None) for key, module in sys.modules.items()
                 if key == name or key.startswith(f'{name}.')]
        if any(files):
            return list(filter(None, files))
    relative = name.replace('.', os.sep)
    candidates = (os.path.join(folder, tail) for folder in (os.getcwd(), *sys.path)
                  for tail in (f'{relative}.py', os.path.join(relative, '__init__.py')))
    return [path for path in candidates if os.path.isfile(path)][:1]
