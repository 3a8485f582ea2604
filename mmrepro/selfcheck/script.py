"""Run the definitions of a script once more, without what it does.

A class that is defined in the script which was started belongs to no module that another process
could import. Its statements run again, one by one: those that would write, remove, start a process
or build a runner are refused and left out. A package that one of them imports may make the folder
of its cache.
"""
from __future__ import annotations

import ast
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mmengine.runner import Runner

from ..util.scoped import replaced

SECONDS = 60  # limit of a statement
# audit events of what a script may not do, see the table in Python's documentation
_REFUSED = ('os.remove', 'os.rename', 'os.rmdir', 'os.truncate', 'os.link', 'os.symlink',
            'os.chmod', 'os.fork', 'os.forkpty', 'os.exec', 'os.posix_spawn', 'os.system',
            'os.kill', 'subprocess.Popen', 'shutil.rmtree', 'shutil.move', 'shutil.copyfile',
            'shutil.copytree', 'socket.connect', 'socket.bind', 'sqlite3.connect')
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


class Refused(BaseException):
    """A statement would have an effect; no ``except Exception`` of the script swallows it."""


def path_of(main: ModuleType | None) -> str | None:
    """Return the file of the script that was started; None for ``python -m`` and notebooks."""
    path = getattr(main, '__file__', None)
    if path is None or getattr(main, '__spec__', None) is not None:
        return None
    return os.path.abspath(str(path))


class _Guard:
    """Refuses, while it is on, what would have an effect outside of the process."""
    on = False
    imports = False  # the statement is an import
    installed = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and self._has_effect(event, args):
            raise Refused(event)

    def _has_effect(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == 'open':
            return opens_for_writing(*args[1:3]) and args[0] != os.devnull
        if event == 'os.mkdir':
            return not self.imports and not os.path.isdir(args[0])
        return event in _REFUSED

    @contextmanager
    def block(self, statement: ast.stmt) -> Iterator[None]:
        def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
            raise Refused(cls.__name__)

        if not self.installed:
            self.installed = True
            sys.addaudithook(self)  # stays: Python has no way to remove one
        # where no bytecode of a module is kept yet, an import would write it
        with replaced(Runner, __new__=refuse), replaced(sys, dont_write_bytecode=True), replaced(
                self, on=True, imports=isinstance(statement, (ast.Import, ast.ImportFrom))):
            yield


_guard = _Guard()


def opens_for_writing(mode: Any, flags: Any) -> bool:
    """Whether these arguments of the audit event ``open`` make or change a file."""
    if isinstance(mode, str):
        return any(letter in mode for letter in 'wax+')
    return isinstance(flags, int) and bool(flags & _WRITES)


def run_definitions(path: str, names: Sequence[str]) -> None:
    """Run the statements of a script that have no effect outside of the process, as ``__main__``.

    Statements below ``if __name__ == '__main__'`` are left out, as in spawned processes. The
    rest of the script is left out when a statement was refused and all of ``names`` are defined.
    """
    module = ModuleType('__main__')
    module.__file__ = path
    sys.modules['__main__'] = module
    with open(path, 'rb') as file:
        tree = ast.parse(file.read(), path)
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom)
               and node.module == '__future__']
    for statement in tree.body:
        if _asks_for_main(statement):
            continue
        code = compile(ast.Module([*futures, statement], []), path, 'exec', dont_inherit=True)
        try:
            with _guard.block(statement), _limited(SECONDS):
                exec(code, vars(module))
        except Refused:
            if all(name in vars(module) for name in names):
                return
        except (Exception, SystemExit):
            # of what a refused statement would have defined; a class that is missing is named when
            # the run is built
            continue


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Refuse what takes longer."""
    def refuse(number: int, frame: Any) -> None:
        raise Refused(f'more than {seconds} s')

    before = signal.signal(signal.SIGALRM, refuse)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _asks_for_main(statement: ast.stmt) -> bool:
    """Whether a statement is ``if __name__ == ...``."""
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == '__name__' for node in ast.walk(statement.test))
