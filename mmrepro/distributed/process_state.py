"""State of a process of which each virtual rank has its own, exchanged with the baton.

State that torch or mmrepro keep for each thread needs no exchange: a rank has a thread.
"""
from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from mmengine.utils import ManagerMixin

from .. import seeds
from ..util.libraries import belongs_to_user

# module and variable
MODULE_STATE: tuple[tuple[str, str], ...] = (
    ('mmengine.dist.utils', '_LOCAL_PROCESS_GROUP'),
    # on while a model is built, where ranks may meet
    ('torch.utils.deterministic', 'fill_uninitialized_memory'),
    ('sys', 'stdout'),
)
# variables that a launcher sets, and user code reads
LAUNCHED: tuple[str, ...] = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')

# the user's classes of which each rank has its own attributes -> attributes at the start
_classes: dict[type, dict[str, Any]] = {}


def isolate_class_attributes(objects: Iterable[Any]) -> None:
    """Give each rank its own attributes of the classes of ``objects``."""
    for cls in {cls for instance in objects for cls in type(instance).__mro__}:
        if belongs_to_user(cls.__module__):
            _classes.setdefault(cls, dict(vars(cls)))


def managers() -> list[type[ManagerMixin]]:
    """Return MMEngine's classes that keep instances by name: loggers, message hubs, scopes."""
    classes = [ManagerMixin]
    for cls in classes:  # grows meanwhile
        classes += cls.__subclasses__()
    return classes


@functools.cache
def _nowhere() -> Any:
    return open(os.devnull, 'w', encoding='utf-8')


def _accelerator() -> torch.Generator | None:
    """Return the generator of the device in use, where there is one."""
    if torch.cuda.is_initialized():
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return None


class ProcessState:
    """The state of one rank while another rank runs."""

    def __init__(self) -> None:
        self._generators = seeds.capture_rng(accelerators=False)
        self._dtype = torch.get_default_dtype()
        generator = _accelerator()
        self._device = None if generator is None else generator.get_state()
        self._modules: dict[tuple[str, str], Any] = {
            (module, name): getattr(sys.modules[module], name) for module, name in MODULE_STATE
            if module in sys.modules}
        self._instances = {cls: cls._instance_dict for cls in managers()}
        self._environment = {name: os.environ.get(name) for name in LAUNCHED}
        self._classes = {cls: dict(vars(cls)) for cls in _classes}

    def restore(self) -> None:
        """Bring the state back into force."""
        seeds.restore_rng(self._generators)
        torch.set_default_dtype(self._dtype)
        generator = _accelerator()
        if generator is not None and self._device is not None:
            generator.set_state(self._device)
        for module, name in MODULE_STATE:
            if module in sys.modules:
                # None, the initial value, if another rank was the first to import the module
                setattr(sys.modules[module], name, self._modules.get((module, name)))
        for cls in managers():
            # no instance yet of a class that another rank was the first to import
            cls._instance_dict = self._instances.setdefault(cls, type(cls._instance_dict)())
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for cls, start in _classes.items():
            before, now = self._classes.get(cls, start), dict(vars(cls))
            for name in now.keys() - before.keys():
                delattr(cls, name)
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    setattr(cls, name, value)

    def end(self) -> None:
        """Restore the state when all ranks have ended."""
        self.restore()
        _classes.clear()

    def of_rank(self, number: int, world_size: int) -> ProcessState:
        """Return a copy for a rank that begins.

        Its environment says that all ranks run on one machine: a process may have any of them.
        """
        state = copy.copy(self)
        state._modules = dict(self._modules)
        if number:  # the first rank speaks for all
            state._modules['sys', 'stdout'] = _nowhere()
        state._environment = {name: str(world_size if name.endswith('SIZE') else number)
                              for name in LAUNCHED}
        state._instances = {cls: copy.copy(value) for cls, value in self._instances.items()}
        return state
