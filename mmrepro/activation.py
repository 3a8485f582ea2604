"""The one activation point: ``Runner.from_cfg`` and ``Runner(...)`` build reproducible runners.

Importing ``mmrepro`` calls :func:`activate`. It imports neither torch nor mmengine: when
``mmengine.runner`` is not there yet, its classes are changed at the moment of their import.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Callable

from . import ops
from .facts import variables
from .util import imports

# methods of the mixin that a Runner subclass must not replace without calling them
OWN_METHODS = ('set_randomness', 'build_dataloader')


@functools.cache
def reproducible_class(cls: type) -> type:
    """Return the class to build when ``cls.from_cfg`` is called.

    Raises:
        RandomnessError: for a Runner subclass that replaces what the mixin replaces.
    """
    from mmengine.runner import Runner

    from .errors import RandomnessError
    from .run.runner import ReproRunner, ReproRunnerMixin
    if issubclass(cls, ReproRunnerMixin):
        return cls
    if cls is Runner:
        return ReproRunner
    for base in cls.__mro__[:cls.__mro__.index(Runner)]:
        methods = [name for name in OWN_METHODS if name in vars(base)]
        if methods:
            raise RandomnessError(
                f'{base.__module__}.{base.__qualname__} has its own {" and ".join(methods)}, which '
                'mmrepro replaces. Derive it from mmrepro.ReproRunnerMixin first and Runner '
                'second, and call super() in these methods')
    return type(f'Repro{cls.__name__}', (ReproRunnerMixin, cls), {
        '__module__': cls.__module__, '_mmrepro_of': cls})


def _refuse(cls: type) -> type:
    from .errors import RandomnessError
    raise RandomnessError(
        f'{cls.__name__} takes its seeds from its strategy (DeepSpeed, FSDP, ColossalAI), '
        'whose sharded states and reductions mmrepro cannot vouch for. Use '
        "runner_type='Runner', or remove mmrepro from custom_imports")


# module that defines the class: (class, the class to make instead)
TARGETS: dict[str, tuple[str, Callable[[type], type]]] = {
    'mmengine.runner.runner': ('Runner', reproducible_class),
    'mmengine.runner._flexible_runner': ('FlexibleRunner', _refuse),
}

REFUSED_RUNNERS = tuple(name for name, wanted in TARGETS.values() if wanted is _refuse)

_originals: dict[str, Any] = {}  # module -> the class's own from_cfg, a classmethod


def _change(module: ModuleType) -> None:
    name, wanted = TARGETS[module.__name__]
    cls = getattr(module, name)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        # stays when mmrepro is deactivated: a class that once had a `__new__` cannot lose it
        return object.__new__(wanted(cls) if is_active() else cls)

    def from_cfg(cls: type, cfg: Any) -> Any:
        """Build a runner as MMEngine does, with the reproducible form of the class."""
        from .config import prepare_cfg
        return original.__func__(wanted(cls), prepare_cfg(cfg))

    if '__new__' not in vars(cls):
        cls.__new__ = __new__
    if module.__name__ not in _originals:
        original = _originals[module.__name__] = vars(cls)['from_cfg']
        cls.from_cfg = classmethod(from_cfg)


# both are imported when MMEngine reads a checkpoint, in whatever order they come
_READERS = ('torch', 'mmengine.logging')


def _allow_checkpoints(module: ModuleType) -> None:
    if all(name in sys.modules for name in _READERS):
        from .checkpoint import safe_loading
        safe_loading.allow()


# of mmcv, with functions that ONNX has operators for
_EXPORTED = ('mmcv.ops.deform_conv', 'mmcv.ops.modulated_deform_conv', 'mmcv.ops.roi_align')


def _describe_in_onnx(module: ModuleType) -> None:
    from .ops import exported
    exported.describe(module)


# module -> what is done when it is imported
_ACTIONS: tuple[tuple[str, imports.Action], ...] = (
    *((name, _describe_in_onnx) for name in _EXPORTED), *((name, _change) for name in TARGETS),
    *((name, _allow_checkpoints) for name in _READERS))
_active = False


def activate(randomness: Mapping[str, Any] | None = None) -> None:
    """Make ``Runner`` reproducible however it is built, provide ``mmcv._ext``, let ``torch.load``
    accept what MMEngine saves, and note which environment variables are read; idempotent.

    Args:
        randomness: for programs that build configs by themselves: keys of
            :class:`mmrepro.RandomnessConfig` that replace those of every runner's config, until
            the next call with a dict, or :func:`deactivate`. An empty dict replaces nothing.

    Raises:
        RandomnessError: an unknown key in ``randomness``, a wrong type or value.
    """
    global _active
    if randomness is not None:
        from . import config
        config.set_for_process(randomness)
    _active = True
    variables.watch()
    ops.install()
    for name, action in _ACTIONS:
        imports.after_import(name, action)


def deactivate() -> None:
    """Undo :func:`activate`, the patches, and the determinism flags: a config runs as before."""
    global _active
    _active = False
    variables.watch(False)
    for name, action in _ACTIONS:
        imports.forget(name, action)
    if 'mmrepro.ops.exported' in sys.modules:
        from .ops import exported
        exported.undescribe()
    if 'mmrepro.checkpoint.safe_loading' in sys.modules:
        from .checkpoint import safe_loading
        safe_loading.disallow()
    for module, original in _originals.items():
        getattr(sys.modules[module], TARGETS[module][0]).from_cfg = original
    _originals.clear()
    ops.uninstall()
    from . import config, determinism, patches, seeds
    config.set_for_process(None)
    patches.revert()
    determinism.disable()
    seeds.set_root(None)


def is_active() -> bool:
    """Whether new runners are reproducible."""
    return _active
