"""Fresh interpreters for tests, whose imports are made once: forks of a process that did no more.

    warm = Warm(['mmrepro.run.runner'])
    warm.popen([sys.executable, '-c', 'print(1)'], stdout=file)     as subprocess.Popen
    warm.program('-m mmrepro')          text of a shell script that runs this in such a fork

A fork has the variables, the folder and the open files that are asked for. What Python reads when
it starts (the seed of hashes, ``sitecustomize``) is that of the process which is forked.
"""
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress

PASSED_ON = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


class Started:
    """A started fork, with the methods of ``subprocess.Popen`` that tests and package call."""

    def __init__(self, warm, pid):
        self._warm, self.pid = warm, pid

    @property
    def returncode(self):
        return self._warm.codes.get(self.pid)

    def poll(self):
        self._warm.receive(0)
        return self.returncode

    def wait(self, timeout=None):
        while self.poll() is None:
            if not self._warm.receive(timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode


class Warm:
    """The process that is forked.

    Args:
        modules: what it imports; these may keep nothing that a training would change.
        env: its variables.
        path: ``sys.path`` of its forks, where it is known: what distributions there have is looked
            up once.
    """

    def __init__(self, modules, env, path=()):
        here, there = socket.socketpair()
        self._socket, self.codes = here, {}
        self._folder = tempfile.TemporaryDirectory(prefix='warm-')
        self._address = os.path.join(self._folder.name, 'socket')
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen()
        files = [there.fileno(), listener.fileno()]
        self._hash_seed = env.get('PYTHONHASHSEED', '')
        self._process = subprocess.Popen(
            [sys.executable, '-W', 'ignore', __file__, *map(str, files), json.dumps(list(path)),
             *modules], pass_fds=files, env=env)
        there.close()
        listener.close()
        self._lines = here.makefile('rb', 0)

    def popen(self, command, stdin=None, stdout=None, stderr=None, cwd=None, env=None,
              pass_fds=(), start_new_session=False):
        """Start a command of Python as :class:`subprocess.Popen` does."""
        assert command[0] == sys.executable and stdin in (None, subprocess.DEVNULL)
        error = stdout if stderr in (None, subprocess.STDOUT) else stderr
        task = dict(
            arguments=list(map(str, command[1:])), cwd=str(cwd or os.getcwd()),
            env=dict(os.environ if env is None else env), group=start_new_session,
            fds=[1, 2, *pass_fds])
        _send(self._socket, task, [stdout.fileno(), error.fileno(), *pass_fds])
        started = json.loads(self._lines.readline())
        while 'code' in started:  # of another one
            self.codes[started['pid']] = started['code']
            started = json.loads(self._lines.readline())
        return Started(self, started['pid'])

    def python(self, *arguments, **options):
        """Run Python with these arguments to its end; returns what it prints."""
        with tempfile.TemporaryFile('w+') as output:
            command = [sys.executable, *arguments]
            code = self.popen(command, stdout=output, **options).wait()
            output.seek(0)
            said = output.read()
        assert code == 0, said[-4000:]
        return said

    def program(self, arguments=''):
        """Return a shell script that runs Python with some arguments before its own.

        It is a fork, or a fresh interpreter where a variable asks for another seed of hashes.
        """
        return (f'#!/bin/sh\ncase "$PYTHONHASHSEED" in ""|"{self._hash_seed}") exec '
                f'{sys.executable} -I -S {__file__} {self._address} {arguments} "$@";; esac\n'
                f'exec {sys.executable} {arguments} "$@"\n')

    def receive(self, seconds):
        """Receive the exit code of a fork; returns whether there was one within the time."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return False
        ended = json.loads(self._lines.readline())
        self.codes[ended['pid']] = ended['code']
        return True

    def close(self):
        self._socket.shutdown(socket.SHUT_WR)
        self._process.wait()
        self._lines.close()
        self._socket.close()
        self._folder.cleanup()


def _ask(address, arguments):
    """Run a task in a fork for this process, whose files, folder and variables it has."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        _send(connection, dict(arguments=arguments, cwd=os.getcwd(), env=dict(os.environ),
                               group=False, fds=[0, 1, 2]), [0, 1, 2])
        lines = connection.makefile('rb', 0)
        pid = json.loads(lines.readline())['pid']
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        return json.loads(lines.readline())['code']


def _send(connection, task, files):
    text = json.dumps(task).encode()
    socket.send_fds(connection, [len(text).to_bytes(4, 'big')], files)
    connection.sendall(text)


# ------------------------------------------------------------------- in the process that is forked

def _run(arguments):
    """Run ``-c CODE``, ``-m MODULE`` or a script as Python does, in this process."""
    first, *rest = arguments
    if first == '-c':
        sys.argv = ['-c', *rest[1:]]
        sys.path.insert(0, '')
        exec(compile(rest[0], '<string>', 'exec'), sys.modules['__main__'].__dict__)
    elif first == '-m':
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name='__main__', alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name='__main__')


def _become(task, files):
    """Run a task in this process, a fork; returns its exit code."""
    above = max(*task['fds'], *files) + 1  # a number that is free, and that nobody asks for
    high = [os.dup2(file, above + index) for index, file in enumerate(files)]
    for file, number in zip(high, task['fds']):
        os.dup2(file, number)
        os.close(file)
    # what the buffers of the forked process knew of its files is not so here
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, 'w', buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = open(2, 'w', buffering=1, errors='backslashreplace', closefd=False)
    sys.orig_argv = [sys.executable, *task['arguments']]  # of a process that starts again
    os.environ.clear()
    os.environ.update(task['env'])
    os.chdir(task['cwd'])
    try:
        _run(task['arguments'])
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _receive(connection):
    """Return the next task and its files; None at the end."""
    size, files, _, _ = socket.recv_fds(connection, 4, 64)
    if not size:
        return None, []
    text = b''
    while len(text) < int.from_bytes(size, 'big'):
        text += connection.recv(int.from_bytes(size, 'big') - len(text))
    return json.loads(text), files


def _serve(connection, listener, ended):
    """Fork for each task; the connection that has sent a task is told when it begins and ends."""
    others, asked = [], {}  # connections that send a task; pid -> connection

    def tell(to, **content):
        with suppress(BrokenPipeError):  # a program that was killed
            to.sendall(json.dumps(content).encode() + b'\n')

    while True:
        ready = select.select([connection, listener, ended, *others], [], [])[0]
        if ended in ready:
            os.read(ended, 1 << 12)
            for pid, code in _ended(asked):
                to = asked.pop(pid)
                tell(to, pid=pid, code=code)
                if to is not connection:
                    to.close()
        if listener in ready:
            others.append(listener.accept()[0])
        for sender in {connection, *others}.intersection(ready):
            task, files = _receive(sender)
            if task is None and sender is connection:
                return
            if sender is not connection:
                others.remove(sender)
            if task is None:  # a program that was killed before it asked
                sender.close()
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for file in (connection, listener, *others, *asked.values()):
                    file.close()
                code = _become(task, files)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            for file in files:
                os.close(file)
            if task['group']:
                os.setpgid(pid, pid)  # before anybody sends it a signal
            asked[pid] = sender
            tell(sender, pid=pid)


def _ended(pids):
    """Return process number and exit code of each process that has ended."""
    found = []
    for pid in pids:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _look_up(path):
    """Find out which distribution on a path has which imported file; mmrepro remembers it."""
    if path:
        from mmrepro.util import libraries
        before, sys.path[:] = sys.path[:], path
        for file in filter(None, map(libraries.file_of, list(sys.modules.values()))):
            libraries.is_own(file)
        sys.path[:] = before


def main():
    if not sys.argv[1].isdigit():
        code = _ask(sys.argv[1], sys.argv[2:])
        sys.exit(code if code >= 0 else 128 - code)  # as a shell says it
    connection, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for name in sys.argv[4:]:
        importlib.import_module(name)
    _look_up(json.loads(sys.argv[3]))
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(write)
    _serve(connection, listener, read)


if __name__ == '__main__':
    main()
