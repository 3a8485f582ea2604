"""Measure the processor time until the first step of a run has ended, beside stock MMDetection.

    python benchmarks/startup.py DATA_ROOT [--rounds N] [--out FILE]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Needs compiled mmcv, whose operators
stock MMDetection uses. Fresh processes in turns: one does what MMDetection's tools/train.py does
with the demo config of RTMDet-tiny, the other is `mmrepro train` with its default settings. Both
end after the first step. Processes that a run has started and waited for count, as the copy that
repeats the first step does. Prints a Markdown table, writes JSON.
"""
from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# what tools/train.py of MMDetection does
STOCK = '''
import sys
from mmengine.config import Config
from mmengine.runner import Runner
from mmdet.utils import setup_cache_size_limit_of_dynamo
setup_cache_size_limit_of_dynamo()
cfg = Config.fromfile(sys.argv[1])
cfg.work_dir = sys.argv[2]
Runner.from_cfg(cfg).train()
'''
END = '''
import os
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class EndAfterTheFirstStep(Hook):
    priority = 100

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        os._exit(0)
'''


def processor_time(command: list[str], folder: str) -> float:
    """Return the seconds of a process and of what it has waited for.

    Raises:
        CalledProcessError: it has failed; its output is printed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    variables = dict(os.environ, PYTHONPATH=os.pathsep.join(
        [folder, str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]), OMP_NUM_THREADS='1')
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        done.check_returncode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(data_root: str, rounds: int, folder: str) -> dict[str, list[float]]:
    """Return the seconds of each round of both ways."""
    from mmengine.config import Config

    from mmrepro.demo.dataset import demo_config
    cfg = demo_config('rtmdet_tiny', data_root)
    Path(folder, 'end_of_benchmark.py').write_text(END)
    cfg.custom_hooks = [dict(type='EndAfterTheFirstStep')]
    configs = {}
    for way, imports in (('stock', []), ('mmrepro', ['mmrepro'])):
        cfg.custom_imports = dict(imports=[*imports, 'end_of_benchmark'],
                                  allow_failed_imports=False)
        cfg.randomness = dict(seed=1)
        configs[way] = os.path.join(folder, f'config_of_{way}.py')
        Config(cfg._cfg_dict.to_dict()).dump(configs[way])
    commands = {
        'stock': [sys.executable, '-c', STOCK, configs['stock'], 'stock'],
        'mmrepro': [sys.executable, '-m', 'mmrepro', 'train', configs['mmrepro'], '--work-dir',
                    'ours', '--deterministic']}
    times: dict[str, list[float]] = {way: [] for way in commands}
    for number in range(rounds + 1):
        for way, command in commands.items():
            seconds = processor_time(command, folder)
            if number:  # the first round fills the caches of files and of bytecode
                times[way].append(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root', type=os.path.abspath)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--out', type=Path, help='write JSON here')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = measure(args.data_root, args.rounds, folder)
    stock, ours = (statistics.median(times[way]) for way in ('stock', 'mmrepro'))
    print('| stock | mmrepro | more |\n|---|---|---|\n'
          f'| {stock:.2f} s | {ours:.2f} s | {ours - stock:.2f} s |')
    if args.out:
        args.out.write_text(json.dumps(times, indent=1) + '\n')


if __name__ == '__main__':
    main()
