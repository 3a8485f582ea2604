"""Files of users, damaged in every way: an error that names the file, or a result, nothing else.

A row of READERS is a valid file and what reads it; Hypothesis damages the file. All examples of a
row run in a forked child with little memory. They must not run code or change any file.
"""
import contextlib
import io
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
from damage import JSON, LINES, OLD, SAVED, TEXT, TEXTS, damaged, loaded, other_checkpoints, saved
from fake_runs import write_log
from harness import Child
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mmengine.logging import MMLogger
from mmengine.runner import Runner
from small_runs import small_run

from mmrepro import cli
from mmrepro.checkpoint import files, safe_loading
from mmrepro.checkpoint.choosing import plan_resume
from mmrepro.checkpoint.resuming import Comparison, Restoration
from mmrepro.config import RandomnessConfig
from mmrepro.demo.dataset import write_dataset
from mmrepro.errors import CheckpointError, MMReproError
from mmrepro.facts.collect import collect_facts
from mmrepro.localise import search
from mmrepro.runs.config_files import read_config
from mmrepro.verbs.golden import GoldenRecipe, check, read_recipes, record
from mmrepro.verbs.seeds import jobs_of, metrics_of

MEMORY, PROCESSOR = 1 << 28, 1500  # bytes beyond those of the parent, seconds of a whole row
OUT = '../out'  # for what readers write


def verb(*words):
    """Return a reader that runs a verb of the command line; what the verb refuses is raised."""
    def read(runner):
        out = io.TextIOWrapper(io.BytesIO(), 'utf-8')
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = cli.run(words[0], words[1:])
        out.seek(0)
        if code == cli.USAGE:
            raise MMReproError(out.read())
    return read


def resume(**named):
    """Return a reader that does what a resumed run does with its checkpoint before MMEngine."""
    def read(runner):
        plan = plan_resume(dict(resume=True, work_dir='run', **named), strict=False)
        if plan.point is not None:
            MMLogger.get_current_instance().info(plan.point.report)
            plan.seeded(RandomnessConfig.parse(dict(seed=None)))
            comparison, restoration = Comparison(plan), Restoration(plan)
            comparison.compare(collect_facts(runner.cfg, {}, 1))
            comparison.check_data(dict(train_samples=8))
            restoration.take_state(restoration.read(plan.point.path, 'cpu'), runner)
            restoration.restore(runner)
    return read


def check_goldens(runner):
    for recipe in read_recipes('goldens'):
        check(recipe, 'goldens', 'run')


LAST, STEPS = 'run/iter_4.pth', 'mmrepro/fingerprints.rank0.jsonl'
LOG, COCO = 'stock/20260101_000000/vis_data', 'coco/annotations/instances_train2017.json'
COMPARE = verb('compare', 'run', 'twin', '--tolerance', '1')
STOCK = verb('compare', 'stock', 'stock_twin', '--tolerance', '1')
REPEATS = {'replay': verb('replay', 'run', '--work-dir', OUT), 'compare': COMPARE,
           'localise': verb('localise', 'run', 'twin', '--work-dir', OUT)}
READERS = {
    'resume': (LAST, SAVED, resume(load_from=LAST)),
    'resume, unpickler of Python': (LAST, SAVED, resume(load_from=LAST)),
    'resume from the newest': (LAST, SAVED, resume()),
    'resume, format before torch 1.6': ('old.pth', OLD, resume(load_from='old.pth')),
    'last_checkpoint': ('run/last_checkpoint', TEXT, resume()),
    'weights of compare': (LAST, SAVED, COMPARE),
    'checkpoint of localise': ('run/iter_2.pth', SAVED, REPEATS['localise']),
    **{f'fingerprints of {name}': (f'run/{STEPS}', LINES, read) for name, read in REPEATS.items()},
    **{f'manifest of {name}': ('run/mmrepro/manifest.json', JSON, read)
       for name, read in REPEATS.items()},
    'log of compare': (f'{LOG}/scalars.json', LINES, STOCK),
    'log of seeds': (f'{LOG}/scalars.json', LINES, lambda runner: metrics_of('stock')),
    'config beside a log': (f'{LOG}/config.py', TEXT, STOCK),
    'result of seeds': ('seeds/base/seed_0/result.json', JSON, verb(
        'seeds', 'base.py', '--seeds=0,1', '--work-dir=seeds', '--report-only', '--no-plots')),
    'recipe of a golden': ('goldens/base/recipe.json', JSON, check_goldens),
    'facts of a golden': ('goldens/base/*/facts.json', JSON, check_goldens),
    'fingerprints of a golden': (f'goldens/base/*/{STEPS}', LINES, check_goldens),
    'config': ('base.py', TEXT, lambda runner: read_config('base.py', dict(work_dir='x'))),
    'annotations': (COCO, JSON, lambda runner: write_dataset('coco', 0, 0, 0)),
}


@pytest.fixture(scope='module')
def runner(tmp_path_factory):
    """Return a trained runner; its work directory is ``run``, beside the other files of READERS."""
    home = tmp_path_factory.mktemp('fuzz') / 'files'
    (home / 'run').mkdir(parents=True)
    runner = Runner.from_cfg(small_run(
        home / 'run', custom_hooks=[dict(type='FingerprintHook', level='operator')],
        train_cfg=dict(by_epoch=True, max_epochs=1)))
    runner.train()
    write_log(home / 'stock', 3)
    write_log(home / 'stock_twin', 3, off=1)
    texts = {
        'old.pth': saved(loaded((home / LAST).read_bytes()), zipped=False),
        **other_checkpoints(),
        'base.py': b"model = dict(layers=[1, 2])\nrandomness = dict(seed=1)\nval_cfg = None\n",
        COCO: b'{"images": [{"id": 1}], "annotations": []}', 'coco/train2017/1.png': b''}
    with contextlib.chdir(home):
        for name in ('iter_1.pth', 'iter_3.pth'):
            Path('run', name).unlink()
        shutil.copytree('run', 'twin')
        record(GoldenRecipe('base.py', 4), 'goldens', 'run')
        for name, text in texts.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(text)
        for job in jobs_of('base.py', 'base', [0, 1], 'seeds'):
            Path(job.folder).mkdir(parents=True)
            Path(job.folder, 'result.json').write_text(json.dumps(dict(
                config_digest=job.digest, metrics={'mAP': [[1, .5], [2, job.seed / 3]]})))
    return runner


def snapshot():
    return {path: path.is_file() and path.read_bytes()
            for path in Path().rglob('*') if path.suffix != '.log'}


def check_reader(row, examples, runner):
    """Check a reader in this process, which gets little memory."""
    pattern, form, read = row
    os.chdir(Path(runner.work_dir).parent)
    path, = Path().glob(pattern)
    whole, others = path.read_bytes(), [*TEXTS, *filter(None, snapshot().values())]
    size = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR, PROCESSOR))

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None,
              suppress_health_check=[*HealthCheck], phases=[Phase.generate])
    @given(damaged(whole, form, others), st.booleans())
    def check(damage, sealed):
        kind, content = damage
        path.unlink()
        if kind == 'folder':
            path.mkdir()
        elif kind != 'gone':
            path.write_bytes(content)
            if sealed and path.suffix == '.pth':
                with contextlib.suppress(CheckpointError):
                    files.seal(str(path))
        before = snapshot()
        try:
            read(runner)
        except MMReproError as error:
            assert any(part in str(error) for part in path.parts)
        finally:
            after = snapshot()
            for folder in ('ran', OUT):
                shutil.rmtree(folder, ignore_errors=True)
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(whole)
        assert after == before

    check()


@pytest.mark.parametrize('examples', [20, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize('name', READERS)
def test_a_damaged_file_is_refused_or_read(name, examples, runner, monkeypatch):
    """The trainings that replay and localise would start are left out."""
    if 'Python' in name:
        monkeypatch.setattr(safe_loading, '_takes_names', lambda: False)
    monkeypatch.setattr(sys.modules['mmrepro.verbs.replay'], 'run_all', lambda runs, tick: tick())
    monkeypatch.setattr(search, 'start', lambda *arguments: None)
    Child(check_reader, READERS[name], examples, runner).result(PROCESSOR)  # raises as it did
