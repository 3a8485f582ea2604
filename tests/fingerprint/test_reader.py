"""Reading fingerprints: whole files, torn ones, restarts, files that are something else."""
import json

import pytest

from mmrepro.errors import EmptyFingerprints, FingerprintError
from mmrepro.fingerprint.reader import read_rank, read_run
from mmrepro.fingerprint.writer import Writer

START = dict(kind='start', format=1, level='step', interval=1, rank=0, world_size=1, scheme=1,
             iteration=0, manifest='manifest.json')


def step(iteration, parameters='00'):
    return dict(kind='step', iteration=iteration, epoch=0, parameters=parameters)


def written(folder, *records, rank=0):
    path = folder / 'mmrepro' / f'fingerprints.rank{rank}.jsonl'
    writer = Writer(str(path))
    for record in records:
        writer.write(record)
    written = path.read_bytes().splitlines()  # what a process leaves that is killed now
    assert list(map(json.loads, written[-len(records):])) == [*records]
    writer.close()
    return path


def test_a_whole_file(tmp_path):
    val = dict(kind='val', iteration=2, epoch=1, metrics=dict(mAP='0x1p-1'))
    written(tmp_path, START, step(0), step(1), val, dict(kind='end', iteration=2))
    run = read_run(str(tmp_path))
    log = run.ranks[0]
    assert list(log.steps) == [0, 1] and log.vals == [val] and log.ended and log.notes == []
    assert run.notes == [f'{tmp_path}/mmrepro: has no manifest.json']
    assert read_run(str(tmp_path / 'mmrepro')).ranks == run.ranks


def test_every_cut_of_a_file_is_readable(tmp_path):
    path = written(tmp_path, START, step(0), step(1))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        log = read_rank(str(path))
        complete = whole[:length].count(b'\n') + (whole[length:length + 1] == b'\n')
        assert len(log.steps) == max(0, complete - 1) and not log.ended
        torn = length and whole[:length][-1:] != b'\n' and whole[length:length + 1] != b'\n'
        assert bool([note for note in log.notes if 'torn off' in note]) == bool(torn)


def test_a_resumed_run_goes_on_below_a_torn_line(tmp_path):
    path = written(tmp_path, START, step(0), step(1), step(2))
    path.write_bytes(path.read_bytes() + b'{"kind":"step","itera')
    written(tmp_path, dict(START, iteration=1), step(1), step(2), dict(kind='end', iteration=3))
    log = read_rank(str(path))
    assert [start['iteration'] for start in log.starts] == [0, 1] and log.ended
    assert list(log.steps) == [0, 1, 2]
    assert log.notes == [f'{path}, line 5: torn off, the process was killed while writing']


def test_what_was_trained_again_and_differs_is_said(tmp_path):
    path = written(tmp_path, START, step(0), step(1, 'aa'), step(2, 'aa'),
                   dict(START, iteration=1), step(1, 'bb'), step(2, 'aa'))
    log = read_rank(str(path))
    assert log.steps[1]['parameters'] == 'bb'
    assert log.notes == ['1 of the iterations that were trained again after a new start differ '
                         'from the first time, the first is 1']


def test_a_new_training_in_the_same_folder_replaces_the_old_one(tmp_path):
    path = written(tmp_path, START, step(0), step(1), dict(kind='val', iteration=2, metrics={}),
                   START, step(0))
    log = read_rank(str(path))
    assert list(log.steps) == [0] and log.vals == []


def test_other_keys_of_a_later_version_are_kept(tmp_path):
    path = written(tmp_path, START, dict(step(0), more=1), dict(kind='new', what=2))
    assert read_rank(str(path)).steps[0]['more'] == 1


@pytest.mark.parametrize(('line', 'message'), [
    (b'{"kind":', 'line 2: not JSON'), (b'[1]', r'line 2: it is \[1\]; allowed: dict'),
    (b'{"kind":"step"}', 'line 2: lacks iteration'),
    (json.dumps(dict(START, format=2)).encode(), 'line 2: format 2 is not known')])
def test_damage_in_the_middle_is_an_error(tmp_path, line, message):
    path = written(tmp_path, START)
    path.write_bytes(path.read_bytes() + line + b'\n' + json.dumps(step(0)).encode() + b'\n')
    with pytest.raises(FingerprintError, match=f'fingerprints.rank0.jsonl, {message}'):
        read_rank(str(path))


def test_missing_files(tmp_path):
    with pytest.raises(FingerprintError, match='nowhere: no such run'):
        read_run(str(tmp_path / 'nowhere'))
    with pytest.raises(FingerprintError, match='has no folder mmrepro; a run writes it'):
        read_run(str(tmp_path))
    (tmp_path / 'epoch_1.pth').touch()
    with pytest.raises(FingerprintError, match=r'it holds epoch_1\.pth, but checkpoints alone'):
        read_run(str(tmp_path))
    (tmp_path / 'mmrepro').mkdir()
    with pytest.raises(FingerprintError, match='has no file fingerprints.rank0.jsonl'):
        read_run(str(tmp_path))
    (tmp_path / 'mmrepro' / 'fingerprints.rank1.jsonl').touch()
    with pytest.raises(EmptyFingerprints, match='rank1.jsonl is empty: the run ended before'):
        read_run(str(tmp_path))
    written(tmp_path, dict(START, world_size=3, rank=1), rank=1)
    (tmp_path / 'mmrepro' / 'manifest.json').write_text(json.dumps(
        dict(kind='manifest', format=1, config=dict(text=''), facts={})))
    assert read_run(str(tmp_path)).notes == [
        f'{tmp_path}/mmrepro: no fingerprints of rank 0, 2 of 3']
    (tmp_path / 'mmrepro' / 'manifest.1.json').write_text('{')
    with pytest.raises(FingerprintError, match='manifest.1.json: not JSON'):
        read_run(str(tmp_path))
