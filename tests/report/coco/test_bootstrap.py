"""Resampled images and seeds: intervals, differences, and files that cannot be used."""
import json
import pickle

import numpy as np
import pytest
import torch
from command import exit_code
from scipy import stats
from support.coco_results import draw_dataset, draw_results

from mmrepro.errors import PredictionError
from mmrepro.report.coco import bootstrap, view
from mmrepro.report.coco.detectors import files_of, load
from mmrepro.report.coco.matches import FIGURES


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Annotations, three seeds of one detector, and of a better one."""
    path = tmp_path_factory.mktemp('coco')
    dataset = draw_dataset(40, 3)
    (path / 'annotations.json').write_text(json.dumps(dataset))
    for seed in range(3):
        for name, noise in (('base', .10), ('mine', .06)):
            (path / f'{name}{seed}.json').write_text(json.dumps(
                draw_results(dataset, seed + (10 if name == 'mine' else 0), noise)))
    return path


@pytest.fixture(scope='module')
def matches(folder):
    words = [f'{name}=' + ','.join(str(folder / f'{name}{seed}.json') for seed in range(3))
             for name in ('base', 'mine')]
    return load(words, str(folder / 'annotations.json'), 'bbox')


def run(folder, *arguments):
    return exit_code('seeds', '--annotations', folder / 'annotations.json', '--no-plots',
                     '--resamples', '200', '--predictions', *arguments)


def test_one_detector_has_an_interval_for_every_figure(matches):
    found = bootstrap.study({'base': matches['base'][:1]}, 200)
    drawn = bootstrap.resampled_figures([matches['base'][:1]], 200)[:, 0, 0]
    assert list(found.figures['base']) == [name for name, *_ in FIGURES]
    for index, one in enumerate(found.figures['base'].values()):
        assert (one.low, one.high) == tuple(np.percentile(drawn[:, index], [2.5, 97.5]))
        assert one.low < one.value < one.high and one.std_seeds is None
    assert found.answer is None and bootstrap.study({'base': matches['base'][:1]}, 200) == found


def test_the_standard_error_of_a_recall_is_that_of_the_ratio_of_sums(matches):
    """One category, one IoU: recall is a ratio of sums over images, with a known standard error."""
    one = matches['base'][0]
    images = len(one.images)
    objects = np.bincount(one._objects[0], minlength=images)
    drawn = bootstrap.resampled_figures([[one]], 400)[:, 0, 0, 8]
    # the mean over categories and IoU of ratios: linearised at the whole (delta method)
    influence = np.zeros(images)
    whole = one.figures()[8]
    for image in range(images):
        weights = np.ones(images, int)
        weights[image] = 2
        influence[image] = (one.figures(weights)[8] - whole) * images
    assert objects.sum() > 0
    assert drawn.std() == pytest.approx(influence.std() / np.sqrt(images), rel=.12)


def test_two_detectors_are_compared_on_the_same_images(matches):
    found = bootstrap.study({name: one[:1] for name, one in matches.items()}, 300, margin=.5)
    gap = found.versus['mine']['mAP']
    assert gap.larger and found.answer and gap.difference.low > 0 and gap.same
    drawn = bootstrap.resampled_figures([one[:1] for one in matches.values()], 300)[:, :, 0, 0]
    assert gap.difference.std_images == pytest.approx((drawn[:, 1] - drawn[:, 0]).std())


def test_on_the_same_images_a_difference_is_known_better_than_its_parts(folder):
    results = json.loads((folder / 'base0.json').read_text())
    (folder / 'fewer.json').write_text(json.dumps(results[::10] + results[1::2]))
    (folder / 'most.json').write_text(json.dumps(results[::10] + results[1::2] + results[2::20]))
    found = bootstrap.study(load([str(folder / 'fewer.json'), str(folder / 'most.json')],
                                 str(folder / 'annotations.json'), 'bbox'), 200)
    apart = [found.figures[name]['mAP'].std_images for name in ('fewer', 'most')]
    assert found.versus['most']['mAP'].difference.std_images < .5 * np.hypot(*apart)


def test_seeds_add_their_variance_to_that_of_the_images(matches):
    found = bootstrap.study(matches, 300).figures['base']['mAP']
    single = [one.figures()[0] for one in matches['base']]
    assert found.value == pytest.approx(np.mean(single))
    assert found.std_seeds == pytest.approx(stats.sem(single))
    images = bootstrap.study({'base': matches['base'][:1]}, 300).figures['base']['mAP']
    assert 0 < found.std_images and images.std_seeds is None


def test_several_detectors_are_corrected(matches):
    three = {'a': matches['base'][:1], 'b': matches['base'][1:2], 'c': matches['mine'][:1]}
    found = bootstrap.study(three, 200, margin=.001)
    p = {label: one['mAP'].p for label, one in found.versus.items()}
    assert found.versus['c']['mAP'].corrected == min(1, 2 * p['c'])
    assert not found.versus['b']['mAP'].larger and not found.answer


def test_tables_plot_and_report(matches):
    for given in (matches, {'base': matches['base'][:1]}):
        found = bootstrap.study(given, 100, margin=.01 if len(given) > 1 else None)
        report = view.report_of(found)
        assert report.images['seeds'].startswith(b'\x89PNG')
        assert 'data:image/png;base64,' in report.html() and 'mAP_75' in str(report)
        json.dumps(report.data, allow_nan=False)


def test_the_command_line(folder, capsys):
    assert run(folder, str(folder / 'base0.json')) == 0
    assert run(folder, str(folder / 'base0.json'), f'x={folder}/mine0.json', '--json') == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index('\n{'):])['versus']['x']['mAP']['larger']
    assert run(folder, str(folder / 'base0.json'), str(folder / 'base1.json'),
               '--same-within', '0.0001') == 1


def dumped(folder, change=lambda results: results):
    """What DumpDetResults writes, of the first detector."""
    results = json.loads((folder / 'base0.json').read_text())
    images = []
    for image in range(1, 41):
        own = [one for one in results if one['image_id'] == image]
        boxes = np.array([one['bbox'] for one in own]).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        images.append(dict(img_id=image, pred_instances=dict(
            bboxes=torch.tensor(boxes), scores=torch.tensor([one['score'] for one in own]),
            labels=torch.tensor([one['category_id'] - 1 for one in own], dtype=torch.long))))
    path = folder / 'dumped.pkl'
    path.write_bytes(pickle.dumps(change(images)))
    return str(path)


def test_a_pickle_file_of_test_out_has_the_figures_of_the_json_file(folder, matches):
    found, = load([dumped(folder)], str(folder / 'annotations.json'), 'bbox')['dumped']
    np.testing.assert_allclose(found.figures(), matches['base'][0].figures(), atol=.01)


def test_files_that_cannot_be_used_are_one_clear_line(folder, capsys):
    def said(*arguments):
        assert run(folder, *map(str, arguments)) == 2
        line, = [one for one in capsys.readouterr().err.splitlines() if one.startswith('mmrepro')]
        return line

    def written(name, content):
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return folder / name

    one = dict(image_id=1, category_id=1, score=.5, bbox=[0, 0, 1, 1])
    assert 'no such file of predictions' in said(folder / 'no.json')
    assert 'cannot be read as predictions' in said(written('bad.json', '{'))
    assert 'not results in the format' in said(written('bad.json', {}))
    assert 'no predictions at all' in said(written('bad.json', []))
    assert 'image_id 99 is not an image of the annotations' in said(
        written('bad.json', [dict(one, image_id=99)]))
    assert 'category_id 99 is not a category' in said(
        written('bad.json', [dict(one, category_id=99)]))
    assert 'has no segmentation' in said(written('bad.json', [one]), '--iou-type', 'segm')
    assert '3 of 40 images of the annotations were not tested, for example id 38' in said(
        dumped(folder, lambda images: images[:-3]))
    assert 'not written by `test --out`' in said(dumped(folder, lambda images: {}))
    assert 'are they two runs of one seed?' in said(
        f'a={folder}/base0.json', f'b={folder}/base0.json')
    assert 'two detectors are called base0' in said(folder / 'base0.json', folder / 'base0.json')
    assert 'different numbers of seeds: base0 1, b 2' in said(
        folder / 'base0.json', f'b={folder}/base1.json,{folder}/base2.json')
    assert 'allowed are mAP, mAP_50' in said(folder / 'base0.json', '--metric', 'map')
    assert '--resamples 10' in said(folder / 'base0.json', '--resamples', '10')
    assert 'two detectors are needed' in said(folder / 'base0.json', '--same-within', '.1')


def test_annotations_that_are_none_are_said(folder):
    (folder / 'no.json').write_text('{"images": [{"id": 1}]}')
    with pytest.raises(PredictionError, match='no.json: .*no categories'):
        load(['a.json'], str(folder / 'no.json'), 'bbox')


def test_the_folder_of_a_study_is_a_detector(tmp_path):
    for seed in (0, 2, 10):
        (tmp_path / f'seed_{seed}').mkdir()
        (tmp_path / f'seed_{seed}' / 'predictions.pkl').touch()
    (label, files), = files_of([str(tmp_path)]).items()
    assert label == tmp_path.name
    assert [file.split('_')[-1].split('/')[0] for file in files] == ['0', '2', '10']
    with pytest.raises(PredictionError, match='has no seed_'):
        files_of([str(tmp_path / 'seed_0')])
