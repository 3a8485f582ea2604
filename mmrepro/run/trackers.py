"""What identifies a run, for the trackers that MMEngine's visualizer writes to."""
from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Callable

from mmengine.dist import is_main_process

from .. import seeds
from ..facts.compatibility import CHANGES, severity
from .hooks.fingerprint import FingerprintHook
from .hooks.self_check import self_checks

# class of a backend -> methods of its `experiment` for values that stay, later values, and files
TRACKERS = {
    'TensorboardVisBackend': dict(params='add_text', tags='add_text', file='add_text'),
    'MLflowVisBackend': dict(params='log_params', tags='set_tags', file='log_artifact'),
    'WandbVisBackend': dict(params='config.update', tags='run.summary.update', file='save'),
    'AimVisBackend': dict(params='set', tags='set', file='set'),
}
BY_ITEM = ('add_text', 'set')  # take a name and a text, which may be that of a file


def track(runner: Any, **given: Callable[[], Any]) -> None:
    """Give each tracker what these functions return; one that fails is named in a warning."""
    for name, backend in runner.visualizer._vis_backends.items() if is_main_process() else ():
        methods = TRACKERS.get(type(backend).__name__, {})
        for kind, value in given.items() if methods else ():
            try:
                with seeds.isolate_rng():  # a tracker may draw the name of its run
                    if values := value():
                        write = attrgetter(methods[kind])(backend.experiment)
                        by_item = methods[kind] in BY_ITEM
                        if kind == 'file' and by_item:
                            path = Path(values)
                            values = {f'mmrepro/{path.name}': path.read_text('utf-8')}
                        for arguments in values.items() if by_item else [(values, )]:
                            write(*arguments)
            except Exception as error:  # of the package, the disk or a server
                runner.logger.warning(f'{name} did not take the {kind} of mmrepro: '
                                      f'{type(error).__name__}: {error}')


def start(runner: Any, facts: Mapping[str, Any]) -> None:
    """Track the seed and all other facts that change bits, and the manifest."""
    track(runner, file=lambda: _manifest(runner), params=lambda: {
        f'mmrepro/{name}': str(value) for name, value in facts.items()
        if not name.startswith('config.') and severity(name, facts) == CHANGES})


def results(runner: Any, name: str, digests: Callable[[], Mapping[str, str]]) -> None:
    """Track digests of weights, what was repeated so far, and at the end the whole manifest."""
    track(runner, file=lambda: _manifest(runner) if name == 'last' else None, tags=lambda: {
        **{f'mmrepro/{kind}/{name}': digest for kind, digest in digests().items()},
        **{f'mmrepro/repeated/{kind}': str(n) for kind, n in self_checks(runner).items()}})


def _manifest(runner: Any) -> str | None:
    return next((hook.manifest for hook in runner.hooks if isinstance(hook, FingerprintHook)), None)
