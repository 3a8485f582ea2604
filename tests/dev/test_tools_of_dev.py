"""The tools of dev: matrices of runs, pages that are made from tables, forked children."""
import ast
import importlib.util
import json
import multiprocessing
import os
import signal
from contextlib import nullcontext

import pytest
from children import ChildFailed, finished, run_all
from harness import ROOT
from virtual_faults import FAULTS

from dev import matrix
from dev import resume_matrix as resumes
from dev import virtual_ranks_matrix as virtual
from dev.libraries.data import DATASETS
from dev.libraries.rows import ROWS

RESULTS = ROOT / 'docs' / 'results'


def test_what_developers_run_imports_what_exists():
    for path in [*ROOT.glob('dev/**/*.py'), *ROOT.glob('benchmarks/**/*.py')]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('mmrepro'):
                module = importlib.import_module(node.module)
                for name in (name.name for name in node.names):
                    assert hasattr(module, name) or importlib.util.find_spec(
                        f'{node.module}.{name}'), (path, name)


def test_rows_of_versions_and_libraries_name_environments_and_data_that_exist():
    for row in ROWS.values():
        assert row.environment in matrix.ROWS and row.data in DATASETS


@pytest.mark.nightly
@pytest.mark.parametrize('ranks', [1, 2, 3])
@pytest.mark.parametrize('name', resumes.CONFIGS)
def test_every_resume_point(name, ranks, data_root, tmp_path):
    done = []
    resumes.fill(resumes.rows([name], [ranks]), data_root, tmp_path, done.append)
    assert len(done) == resumes.ITERATIONS
    assert {row['difference'] for row in done} == {''}, done


@pytest.mark.parametrize('name, wanted', [
    ('resume_matrix', resumes.rows(list(resumes.CONFIGS), [1, 2, 3], all_loading=True)),
    ('virtual_ranks_matrix', virtual.rows(
        list(virtual.CONFIGS), list(virtual.RANKS), list(virtual.PROCESSES)))])
def test_a_published_matrix_is_whole_and_equal(name, wanted):
    rows, wanted = json.loads((RESULTS / f'{name}.json').read_text())['rows'], list(wanted)
    found = {tuple(row[key] for key in wanted[0]) for row in rows}
    assert {tuple(row.values()) for row in wanted} <= found
    assert [row for row in rows if row['difference']] == []


def test_a_difference_of_a_resume_is_named():
    line = dict(iteration=4, data='a', losses=dict(loss='0x1p+0'), weights='w')
    expected = dict(ranks=[[dict(line, iteration=3), line]], logged={4: 1, 5: 2})
    found = dict(ranks=[[dict(line, weights='v')]], logged={5: 2})
    assert resumes.first_difference(expected, found, 4) == 'rank 0, iteration 4: weights'
    found['ranks'][0][0]['weights'] = 'w'
    assert resumes.first_difference(expected, found, 4) == ''
    found['logged'] = {5: 3}
    assert resumes.first_difference(expected, found, 4) == 'logged line of step 5'
    assert resumes.first_difference(expected, dict(ranks=[[]], logged={}), 4) == (
        'rank 0: 0 lines instead of 1')


def filled(rows, data_root, folder, fault=None):
    done = []
    with FAULTS[fault]() if fault else nullcontext():
        virtual.fill(rows, data_root, folder, done.append)
    assert len(done) == len(rows)
    return {row['difference'] for row in done}


@pytest.mark.nightly
@pytest.mark.parametrize('ranks', virtual.RANKS)
@pytest.mark.parametrize('name', virtual.CONFIGS)
def test_every_number_of_processes(name, ranks, data_root, tmp_path):
    rows = virtual.rows([name], [ranks], list(virtual.PROCESSES))
    assert filled(rows, data_root, tmp_path) == {''}


@pytest.mark.nightly
@pytest.mark.parametrize('fault', [None, *FAULTS])
def test_a_planted_fault_makes_it_red(fault, data_root, tmp_path):
    rows = [row for row in virtual.rows(list(virtual.FOR_FAULTS), [4], [1, 2])
            if row['processes'] == 2 and not row['resumed_from']]
    try:
        (difference, ) = filled(rows, data_root, tmp_path, fault)
    except ChildFailed as error:  # of a self-check, which sees a validation that shares buffers
        difference = str(error)
        assert 'ValidationChangesError' in difference
    assert bool(difference) == bool(fault)


def test_a_difference_of_virtual_ranks_is_named():
    line = dict(iteration=2, data='a', weights='w')
    expected = [[dict(line, iteration=1), line]] * 2
    assert virtual.difference(expected, [[line], [dict(line, weights='v')]], 2) == (
        'rank 1, iteration 2: weights')
    assert virtual.difference(expected, expected, 0) == ''
    assert virtual.difference(expected, [[line]] * 2, 1) == 'rank 0: 1 lines instead of 2'


@pytest.fixture
def pages():
    spec = importlib.util.spec_from_file_location('pages', ROOT / 'dev' / 'generate_docs.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_show_the_tables_and_the_figures(pages):
    assert pages.stale(write=False) == [], 'run `python dev/generate_docs.py`'


def test_a_page_that_is_out_of_date_is_named_and_regenerated(pages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, 'DOCS', tmp_path)
    monkeypatch.setattr(pages, 'PARTS', (('a.md', 'us', lambda: '| new |'),
                                         ('b.md', '', lambda: 'all')))
    a, b = tmp_path / 'a.md', tmp_path / 'b.md'
    old = 'head\n<!-- made by: us -->\n| old |\n<!-- end of what us made -->\nfoot\n'
    a.write_text(old)
    b.write_text('all')
    assert pages.main(['--check']) == 1 and a.read_text() == old
    assert pages.main([]) == 0 and a.read_text() == old.replace('old', 'new')
    assert pages.main(['--check']) == 0
    assert capsys.readouterr().out == 'docs/a.md: out of date\ndocs/a.md: regenerated\n'
    for text in ('nothing', '<!-- made by: us -->'):
        a.write_text(text)
        with pytest.raises(ValueError, match='the page has no <!-- '):
            pages.main([])
        assert a.read_text() == text


def test_results_come_as_children_end_and_are_returned_in_the_order_of_the_jobs():
    first, second = multiprocessing.get_context('fork').Event(), os.getpid
    jobs = {'waits': (first.wait, (), {}), 'ends': (second, (), {})}
    found = finished(jobs, 2)
    name, process = next(found)
    assert name == 'ends' and process != os.getpid()
    first.set()
    assert [*found] == [('waits', True)]
    assert [*run_all(jobs, 2)] == ['waits', 'ends']


def test_a_group_of_which_none_ends_is_an_error_that_names_it():
    with pytest.raises(TimeoutError, match='of any of one, two'):
        next(finished({'one': (signal.pause, (), {}), 'two': (signal.pause, (), {})}, 2, 0.1))


def test_a_child_that_raises_brings_its_traceback():
    with pytest.raises(ChildFailed, match='invalid literal'):
        run_all({'one': (int, ('a', ), {})})


def test_a_table_of_versions_has_a_second_text_where_avx512_gives_other_digests():
    from dev.versions.__main__ import AVX2, AVX512, _changes, _levels, merged

    def found(*digests):
        return [{'Resize': dict(covers={}, digests=dict(zip(('image', 'boxes'), pair)))}
                for pair in digests]

    parts = merged({AVX2: found(('a', 'c'), ('a', 'c'), ('b', 'c')),
                    AVX512: found(('a', 'c'), ('d', 'c'), ('!ValueError', 'c'))})
    assert parts == {'Resize': dict(covers={}, digests=dict(image='2*a 1*b', boxes='3*c'),
                                    avx512=dict(image='1*a 1*d 1*-'))}
    row = dict(versions=['1', '2', '3'], parts=parts)
    assert _changes(row) == [('2', ['Resize'], ('image (AVX-512)', )),
                             ('3', ['Resize'], ('image (AVX2)', ))]
    assert _levels(row) == [(['Resize'], ('image', ), '2')]


def test_what_two_cpus_disagree_about_counts_as_not_measured():
    from dev.versions.__main__ import AVX2, AVX512, agreed

    def found(*digests):
        return [{'Resize': dict(digests=dict(zip(('image', 'boxes'), pair)))} for pair in digests]

    before = dict(versions=['1', '2'], avx512=['avx512f bf16'], parts={'Resize': dict(
        covers={}, digests=dict(image='2*a', boxes='2*b'), avx512=dict(image='1*a 1*c'))})
    same = found(('a', 'b'), ('a', 'b'))
    rows = agreed(before, {AVX2: same, AVX512: found(('a', 'b'), ('c', 'b'))}, 'avx512f')
    assert rows == dict(before, avx512=['avx512f bf16', 'avx512f'])
    # another digest, an error, a part that is missing
    others = found(('a', 'b'), ('d', '!ValueError'))
    rows = agreed(before, {AVX2: same, AVX512: others}, 'avx512f')
    assert rows['parts']['Resize'] == dict(covers={}, digests=dict(image='2*a', boxes='2*b'),
                                           avx512=dict(image='1*a 1*-', boxes='1*b 1*-'))
    rows = agreed(before, {AVX2: [same[0], {}], AVX512: found(('a', 'b'), ('c', 'b'))}, 'avx512f')
    assert rows['parts']['Resize'] == dict(covers={}, digests=dict(image='1*a 1*-',
                                                                   boxes='1*b 1*-'),
                                           avx512=dict(image='1*a 1*c', boxes='2*b'))


def test_a_stand_in_is_installed_in_place_of_its_package():
    from dev.versions.packages import PACKAGES
    first, *others = PACKAGES['albumentations'].requirements('albumentationsx==2.0.20')
    assert first == 'albumentationsx==2.0.20'
    assert 'albucore==0.0.41' in others
    assert PACKAGES['numpy'].requirements('2.0.2')[0] == 'numpy==2.0.2'
