"""What each replacement is for, and how the rows of the table are put in force and taken out."""
import importlib
import importlib.util
import json
import multiprocessing
import pickle
import random
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from harness import ROOT, digest, python
from mmengine.structures import InstanceData

from dev.causes_report import NOTES, entries
from mmrepro import determinism, patches, seeds
from mmrepro.data.fetch import WorkerInit
from mmrepro.data.samplers import LoaderPosition
from mmrepro.patches import Patch, StockCause, methods

pytestmark = pytest.mark.usefixtures('stock')


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --------------------------------------------------------------------------- C1: class names
class Words:
    tokenize = staticmethod(str.split)

    @classmethod
    def from_pretrained(cls, name):
        return cls


@pytest.fixture
def label_map(tmp_path, monkeypatch):
    from mmdet.datasets.transforms import text_transformers
    monkeypatch.setattr(text_transformers, 'AutoTokenizer', Words)
    path = tmp_path / 'labels.json'
    path.write_text(json.dumps({str(i): f'a{i}/b{i}/c{i}' for i in range(8)}))
    return path


def text_of(transform, seed):
    seed_all(seed)
    return transform(dict(gt_bboxes=np.zeros((2, 4)), gt_bboxes_labels=np.array([1, 4])))['text']


@pytest.mark.parametrize('as_string', [True, False])
def test_earlier_samples_do_not_choose_the_names_of_later_ones(label_map, as_string):
    from mmdet.datasets.transforms import RandomSamplingNegPos
    from mmdet.registry import TRANSFORMS
    kind = 'RandomSamplingNegPos' if as_string else RandomSamplingNegPos

    def build():
        return TRANSFORMS.build(
            dict(type=kind, tokenizer_name='any', label_map_file=str(label_map)))

    def depends_on_history():
        fresh, used = build(), build()
        text_of(used, 1)
        return text_of(fresh, 2) != text_of(used, 2)

    assert depends_on_history()
    patches.apply()
    assert not depends_on_history()
    assert repr(build()).startswith(repr(object.__new__(RandomSamplingNegPos))[:20])


def test_the_names_of_a_sample_are_not_written_to(label_map):
    from mmdet.datasets.transforms import RandomSamplingNegPos
    names = json.loads(label_map.read_text())
    untouched = dict(names)
    transform = RandomSamplingNegPos('any')
    patches.apply()
    transform(dict(gt_bboxes=np.zeros((1, 4)), gt_bboxes_labels=np.array([1]), text=names))
    assert names == untouched


# --------------------------------------------------------------------------- C2: positives
def balanced(expected):
    """Positives that the sampler picks: 4 objects, one of them with 40 boxes, three with one."""
    from mmdet.models.task_modules import AssignResult
    from mmdet.registry import TASK_UTILS
    sampler = TASK_UTILS.build(
        dict(type='InstanceBalancedPosSampler', num=expected, pos_fraction=1.0,
             add_gt_as_proposals=False))
    owners = torch.tensor([1, 2, 3] + [4] * 40 + [0] * 5)
    seed_all(0)
    result = AssignResult(4, owners, torch.zeros(len(owners)), torch.zeros(len(owners)).long())
    return sampler._sample_pos(result, expected).tolist()


def test_positives_do_not_depend_on_memory_addresses_and_none_is_sampled_twice():
    def outcomes(runs):
        seen, ballast = set(), []
        for size in range(runs):
            ballast.append([torch.zeros(1) for _ in range(7 * size)])
            seen.add(tuple(balanced(32)))
        return seen

    assert len(outcomes(8)) > 1
    patches.apply()
    picked, = outcomes(8)
    assert len(picked) == len(set(picked)) == 32
    assert all(index < 43 for index in picked)


def test_stock_sampler_when_every_positive_is_taken_stays():
    expected = balanced(64)
    patches.apply()
    assert balanced(64) == expected == list(range(43))


# --------------------------------------------------------------------------- C5, C6: drawing
def check_that_it_leaves_the_generator(function):
    """Check that the stock function moves NumPy's generator, and the replacement does not."""
    seed_all(7)
    before = digest(seeds.capture_rng())
    expected = function()
    assert digest(seeds.capture_rng()) != before
    patches.apply()
    seed_all(7)
    assert function() == expected
    assert digest(seeds.capture_rng()) == before


def draw_track(monkeypatch):
    from mmdet.visualization import local_visualizer
    palette = [(i / 10, 0.5, 0.5) for i in range(10)]
    monkeypatch.setattr(local_visualizer, 'sns', SimpleNamespace(color_palette=lambda: palette))
    return local_visualizer.random_color(5)


def draw_masks(monkeypatch):
    from mmdet.structures import DetDataSample
    from mmdet.visualization import DetLocalVisualizer
    masks = torch.zeros(2, 24, 32, dtype=torch.bool)
    masks[0, 2:9, 2:9] = masks[1, 12:20, 12:30] = True
    sample = DetDataSample(gt_instances=InstanceData(
        labels=torch.tensor([0, 0]), masks=masks,
        bboxes=torch.tensor([[2., 2, 9, 9], [12, 12, 30, 20]])))
    visualizer = DetLocalVisualizer()
    visualizer.dataset_meta = dict(classes=('cat', ), palette=[(220, 20, 60)])
    visualizer.add_datasample('name', np.zeros((24, 32, 3), np.uint8), sample, draw_pred=False)
    return visualizer.get_image().tobytes()


def draw_grounding(monkeypatch):
    """Draws the palette, then stops at the visualizer that is not there."""
    from mmdet.engine.hooks import GroundingVisualizationHook
    from mmdet.structures import DetDataSample
    hook = GroundingVisualizationHook.__new__(GroundingVisualizationHook)
    hook.draw, hook.test_out_dir, hook._test_index = True, None, 0
    hook.backend_args, hook.score_thr = None, 0.3
    monkeypatch.setattr('mmdet.engine.hooks.visualization_hook.get', lambda *a, **k: b'')
    monkeypatch.setattr('mmcv.imfrombytes', lambda *a, **k: np.zeros((8, 8, 3), np.uint8))
    boxes = dict(labels=torch.tensor([0]), bboxes=torch.zeros(1, 4))
    sample = DetDataSample(
        metainfo=dict(img_path='a', text='a cat', tokens_positive=[[[0, 1]]]),
        gt_instances=InstanceData(**boxes),
        pred_instances=InstanceData(**boxes, scores=torch.ones(1)))
    with pytest.raises(AttributeError, match='_visualizer'):
        hook.after_test_iter(None, 0, {}, [sample])


@pytest.mark.parametrize('draw', [draw_track, draw_masks, draw_grounding])
def test_drawing_leaves_the_generator(draw, monkeypatch):
    check_that_it_leaves_the_generator(lambda: draw(monkeypatch))


# --------------------------------------------------------------------------- C7: listing
def ade_index(monkeypatch, listing):
    from mmdet.datasets import ade20k
    fileio = SimpleNamespace(list_dir_or_file=lambda **kwargs: iter(listing))
    monkeypatch.setattr(ade20k, 'fileio', fileio)
    dataset = ade20k.ADE20KSegDataset(
        data_prefix=dict(img_path='images', seg_map_path='maps'), lazy_init=True)
    return [(info['img_path'], info['seg_map_path']) for info in dataset.load_data_list()]


def test_the_order_of_a_directory_does_not_matter(monkeypatch):
    listings = (['b.jpg', 'a.jpg', 'c.jpg'], ['c.jpg', 'b.jpg', 'a.jpg'])
    first, second = (ade_index(monkeypatch, listing) for listing in listings)
    assert first != second
    patches.apply()
    first, second = (ade_index(monkeypatch, listing) for listing in listings)
    assert first == second == [(f'images/{n}.jpg', f'maps/{n}.png') for n in 'abc']


# --------------------------------------------------------------------------- C8: sentences
@pytest.fixture
def refcoco(tmp_path):
    """Loader of a RefCOCO dataset: 30 objects with 5 sentences each."""
    from mmdet.datasets import RefCocoDataset
    count = 30
    refs = [dict(ref_id=100 + i, ann_id=i, image_id=i // 3, split='train',
                 sentences=[dict(raw=f'Text {i} {k}') for k in range(5)]) for i in range(count)]
    (tmp_path / 'refs.p').write_bytes(pickle.dumps(refs))
    (tmp_path / 'instances.json').write_text(json.dumps(dict(
        images=[dict(id=i, file_name=f'{i}.jpg') for i in range(count // 3)],
        annotations=[dict(id=i, image_id=i // 3, segmentation=[]) for i in range(count)])))

    def load(python_seed, text_mode='random', split='train'):
        random.seed(python_seed)
        dataset = RefCocoDataset(str(tmp_path), 'instances.json', 'refs.p', dict(img_path='x'),
                                 split=split, text_mode=text_mode)
        return [dataset.get_data_info(i)['text'] for i in range(len(dataset))]

    yield load
    seeds.set_root(None)


def test_sentences_depend_on_the_root_seed_alone(refcoco):
    seeds.set_root(42)
    assert refcoco(1) != refcoco(2)
    patches.apply()
    chosen = refcoco(1)
    assert chosen == refcoco(2)
    assert {text[-1] for texts in chosen for text in texts} == set('01234')
    seeds.set_root(43)
    assert refcoco(1) != chosen


@pytest.mark.parametrize('root, text_mode', [
    (None, 'random'), (42, 'original'), (42, 'concat'), (42, 'select_first')])
def test_other_text_modes_and_those_without_an_active_seed_are_stock(refcoco, root, text_mode):
    seeds.set_root(root)
    expected = refcoco(1, text_mode)
    patches.apply()
    assert refcoco(1, text_mode) == expected


# --------------------------------------------------------------------------- C14: mixtures
class CountingMixture:
    """Stands for old versions of scikit-learn: draws where it is given no seed."""

    def __init__(self, components, random_state=None, **kwargs):
        self.random_state = np.random.mtrand._rand if random_state is None else (
            np.random.RandomState(random_state))

    def fit(self, values):
        self.random_state.rand()
        return self


def test_fitting_a_mixture_leaves_the_generator(monkeypatch):
    from mmdet.models.dense_heads import paa_head
    module = SimpleNamespace(GaussianMixture=CountingMixture, other='kept')
    monkeypatch.setattr(paa_head, 'skm', module)

    def fit():
        paa_head.skm.GaussianMixture(2, weights_init=[0.5, 0.5]).fit([])

    check_that_it_leaves_the_generator(fit)
    assert paa_head.skm.other == 'kept'
    patches.revert()
    assert paa_head.skm is module


def test_without_scikit_learn_nothing_takes_its_place(monkeypatch):
    from mmdet.models.dense_heads import paa_head
    monkeypatch.setattr(paa_head, 'skm', None)
    patches.apply()
    assert paa_head.skm is None


# --------------------------------------------------------------------------- C23: SSD
def test_ssd_infers():
    from mmdet.models.dense_heads import SSDHead
    from mmengine.config import ConfigDict
    from mmengine.registry import DefaultScope

    def predict():
        head = SSDHead(num_classes=2, in_channels=(4,), anchor_generator=dict(
            type='SSDAnchorGenerator', scale_major=False, input_size=32, basesize_ratio_range=(
                0.2, 0.9), strides=[8], ratios=[[2]], min_sizes=[8], max_sizes=[16]),
            test_cfg=ConfigDict(nms_pre=20, score_thr=0.01, max_per_img=5,
                                nms=dict(type='nms', iou_threshold=0.5)))
        outs = head([torch.ones(1, 4, 4, 4)])
        return head.predict_by_feat(*outs, batch_img_metas=[dict(
            img_shape=(32, 32), scale_factor=(1., 1.))])

    with DefaultScope.overwrite_default_scope('mmdet'):
        with pytest.raises(AttributeError, match='loss_cls'):
            predict()
        patches.apply()
        assert len(predict()[0]) == 5


# --------------------------------------------------------------------------- C22: TridentNet
def test_trident_convolutions_do_not_start_from_old_memory():
    from mmdet.models.backbones.trident_resnet import TridentConv

    def start():
        # what was there before: the allocator hands the same memory out again
        torch.full((8, 8, 3, 3), 7.)
        seed_all(7)
        return TridentConv(8, 8, 3).weight.detach().clone()

    patches.apply()
    first, second = start(), start()
    assert torch.equal(first, second)
    assert 0.1 < first.std() < 0.3 and not (first == 7).any()  # sqrt(2 / (8 * 9)) = 0.17


# --------------------------------------------------------------------------- C17: corruptions
def corrupted(monkeypatch, name, corrupt):
    from mmdet.datasets.transforms import transforms
    monkeypatch.setattr(transforms, 'corrupt', corrupt)
    np.random.seed(5)
    return transforms.Corrupt(name)(dict(img=np.full((16, 16, 3), 100, np.uint8)))['img'].tobytes()


def test_impulse_noise_follows_the_sample(monkeypatch):
    import skimage.util
    stock_noise = skimage.util.random_noise

    def corrupt(image, corruption_name, severity):
        return np.uint8(skimage.util.random_noise(image / 255., mode='s&p', amount=.3) * 255)

    assert len({corrupted(monkeypatch, 'impulse_noise', corrupt) for _ in range(3)}) > 1
    patches.apply()
    assert len({corrupted(monkeypatch, 'impulse_noise', corrupt) for _ in range(3)}) == 1
    assert skimage.util.random_noise is stock_noise


def test_compiled_glass_blur_follows_the_sample(monkeypatch):
    compiled = np.random.RandomState()  # stands for the generator inside compiled code

    def njit(function):
        # compiled code sees a NumPy whose random module is another generator
        namespace = {'np': SimpleNamespace(random=compiled)}
        return type(function)(function.__code__, namespace)

    monkeypatch.setitem(sys.modules, 'numba', SimpleNamespace(njit=njit))

    def corrupt(image, corruption_name, severity):
        return np.uint8(compiled.randint(0, 255, image.shape))

    assert len({corrupted(monkeypatch, 'glass_blur', corrupt) for _ in range(3)}) > 1
    patches.apply()
    from mmrepro.patches import methods
    methods._numba_seeder.cache_clear()
    assert len({corrupted(monkeypatch, 'glass_blur', corrupt) for _ in range(3)}) == 1
    methods._numba_seeder.cache_clear()


def test_other_corruptions_draw_nothing_more(monkeypatch):
    def corrupt(image, corruption_name, severity):
        return np.uint8(np.random.randint(0, 255, image.shape))

    expected = corrupted(monkeypatch, 'gaussian_noise', corrupt)
    patches.apply()
    assert corrupted(monkeypatch, 'gaussian_noise', corrupt) == expected


# --------------------------------------------------------------------------- C24: dynamic k
@pytest.mark.parametrize('kind', ['SimOTAAssigner', 'DynamicSoftLabelAssigner'])
@pytest.mark.parametrize('candidates, objects, levels', [(3, 1, 2), (9, 4, 3), (200, 7, 5),
                                                         (200, 40, 100), (50, 3, 10 ** 6)])
def test_matching_at_once_is_the_matching_one_by_one(kind, candidates, objects, levels):
    """Costs have few different values, so that most choices are among equal ones."""
    import mmdet.models.task_modules.assigners as assigners

    from mmrepro.patches.methods import matching_at_once
    random = torch.Generator().manual_seed(candidates + objects)
    cost = torch.randint(levels, (candidates, objects), generator=random) / levels
    ious = torch.rand(candidates, objects, generator=random)
    assigner = getattr(assigners, kind)()
    one_by_one = getattr(type(assigner).dynamic_k_matching, '__wrapped__',
                         type(assigner).dynamic_k_matching)
    with determinism.deterministic(env={}):
        results = []
        for method in (one_by_one, matching_at_once(one_by_one)):
            valid = torch.rand(3 * candidates, generator=torch.Generator().manual_seed(1)
                               ).argsort() < candidates
            results.append((*method(assigner, cost, ious, objects, valid), valid))
    for expected, found in zip(*results):
        assert expected.dtype == found.dtype and torch.equal(expected, found)


def test_matching_is_stock_without_a_stable_topk(monkeypatch):
    from mmrepro.ops import aten
    from mmrepro.patches.methods import matching_at_once
    called = []
    method = matching_at_once(lambda *arguments: called.append(arguments))
    aten.uninstall()
    method(None, torch.rand(4, 2), torch.rand(4, 2), 2, torch.ones(4, dtype=torch.bool))
    assert len(called) == 1


# --------------------------------------------------------------------------- C26: RepPoints
def assigned_points():
    from mmdet.models.task_modules.assigners import PointAssigner
    points = torch.cat([torch.arange(16.)[:, None].expand(16, 2), torch.full((16, 1), 8.)], 1)
    objects = InstanceData(bboxes=torch.tensor([[0., 0, 8, 8], [8, 8, 24, 24]]),
                           labels=torch.tensor([1, 2]))
    return PointAssigner(pos_num=2).assign(InstanceData(priors=points), objects).gt_inds.tolist()


def test_points_are_numbered_on_their_device():
    before = assigned_points()
    patches.apply()
    assert assigned_points() == before and sorted(set(before)) == [0, 1, 2]
    seen = methods.on_device_of_priors(lambda self, instances: torch.arange(2).device)
    assert seen(None, InstanceData(priors=torch.zeros(1, 3, device='meta'))).type == 'meta'


# --------------------------------------------------------------------------- C27: tied scores
def test_equal_scores_stay_in_their_order():
    from mmdet.evaluation.functional import eval_map, mean_ap
    stock = mean_ap.np
    patches.apply()
    scores = np.repeat([.9, .5], 500)
    # an unstable sort of this many equal numbers moves them
    assert (mean_ap.np.argsort(-scores) == np.arange(1000)).all()
    assert mean_ap.np.zeros is np.zeros
    hits = np.zeros((100, 5), np.float32) + [0, 0, 9, 9, .5]
    misses = hits + np.float32([50, 50, 50, 50, 0])
    truth = [dict(bboxes=hits[:1, :4], labels=np.zeros(1, int))]
    first, _ = eval_map([[np.concatenate([hits[:1], misses])]], truth, logger='silent')
    last, _ = eval_map([[np.concatenate([misses, hits[:1]])]], truth, logger='silent')
    assert first == 1 and last < .02
    patches.revert()
    assert mean_ap.np is stock


# --------------------------------------------------------------------------- C20, C21: sums
def test_the_jaccard_index_is_the_same_in_whatever_order_images_come():
    from mmdet.evaluation.metrics import CrowdHumanMetric
    images = [dict(ratio=one, k=1, m=2, n=3) for one in np.random.RandomState(0).rand(60)]
    orders = [images, images[::-1], images[7:] + images[:7]]
    assert len({CrowdHumanMetric.gather(one) for one in orders}) > 1
    patches.apply()
    assert len({CrowdHumanMetric.gather(one) for one in orders}) == 1
    assert len({CrowdHumanMetric(ann_file=None).gather(one) for one in orders}) == 1
    patches.revert()
    assert len({CrowdHumanMetric.gather(one) for one in orders}) > 1


def overlaps_of(number, images, *others):
    return float(sum(images))


def test_panoptic_quality_is_the_same_on_machines_with_more_cores(monkeypatch, capsys):
    from mmdet.evaluation.functional import panoptic_utils
    monkeypatch.setattr(panoptic_utils, 'PQStat', float)  # of a package that is not on PyPI
    monkeypatch.setattr(panoptic_utils, 'pq_compute_single_core', overlaps_of)

    def quality(cores, **settings):
        monkeypatch.setattr(multiprocessing, 'cpu_count', lambda: cores)
        return panoptic_utils.pq_compute_multi_core([.1, .2, .3, .4, .7, .1], '', '', {},
                                                    **settings)

    assert quality(1) != quality(3)
    patches.apply()
    assert quality(1) == quality(2) == quality(3)
    assert quality(1, nproc=2) == quality(2, nproc=2)


# --------------------------------------------------------------------------- C28: --out
def test_files_of_equal_predictions_are_equal(tmp_path):
    from mmengine.evaluator import DumpResults
    patches.apply()

    def dumped(name, shared):
        path = tmp_path / name
        text = ''.join(['a ', 'name'])
        row = torch.arange(6.).reshape(2, 3)[1]
        parts = [row, torch.ones(2, dtype=torch.bfloat16), text, np.ones(2)]
        other = parts if shared else [row.clone(), parts[1].clone(), ''.join(['a n', 'ame']),
                                      np.ones(2)]
        metric = DumpResults(str(path))
        metric.compute_metrics([dict(a=parts, b=other), dict(a=other)])
        return path.read_bytes()

    assert dumped('one.pkl', True) == dumped('two.pkl', False)
    code = (f"import pickle, sys; one = pickle.load(open({str(tmp_path / 'one.pkl')!r}, 'rb'))\n"
            "assert one[0]['b'][0].tolist() == [3, 4, 5] and 'mmrepro' not in sys.modules")
    python('-c', code)


# --------------------------------------------------------------------------- C29: profiler
def test_a_profiler_is_stopped_once():
    from mmengine.hooks import ProfilerHook
    patches.apply()
    stopped = []
    hook = ProfilerHook(by_epoch=False)
    hook.profiler = SimpleNamespace(__exit__=lambda *error: stopped.append('stopped'))
    runner = SimpleNamespace(logger=SimpleNamespace(info=lambda text: None))
    hook.after_train_epoch(runner)
    hook._export_chrome_trace(runner)
    assert stopped == ['stopped']


# --------------------------------------------------------------------------- C16: albumentations
class OwnGenerators:
    """A pipeline as albumentations has had since 1.4.21: generators of its own."""

    def __init__(self, seed=None):
        self.seed = seed
        self.set_random_state(np.random.default_rng(seed), random.Random(seed))

    def set_random_state(self, random_generator, py_random):
        self.random_generator, self.py_random = random_generator, py_random

    def __call__(self, **data):
        return self.random_generator.random(), self.py_random.random()


class GlobalGenerators:
    """A pipeline as albumentations had before 1.4.21: Python's global generator."""

    def __call__(self, **data):
        return random.random()


@pytest.fixture
def fake(monkeypatch):
    """Install a fake pipeline class where MMDetection would have imported the real one."""
    import mmdet.datasets.transforms  # noqa: F401  the real one comes first, if there is one

    def install(cls):
        pipeline = type('Compose', (cls, ), {'__call__': cls.__call__})
        module = ModuleType('albumentations.core.composition')
        module.Compose = pipeline
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return pipeline

    return install


def draw(pipeline, seed):
    seed_all(seed)
    return pipeline(image=None)


def test_own_generators_follow_the_sample(fake):
    cls = fake(OwnGenerators)
    pipeline = cls()
    assert draw(pipeline, 1) != draw(pipeline, 1)
    patches.apply()
    first = draw(pipeline, 1)
    assert pipeline(image=None) != first, 'a second call in one sample draws anew'
    assert draw(pipeline, 2) != first and first[0] != first[1]
    assert draw(pipeline, 1) == first == draw(cls(), 1), 'also a pipeline of another process'


@pytest.mark.parametrize('cls, arguments', [(OwnGenerators, (3, )), (GlobalGenerators, ())])
def test_a_seed_of_the_user_is_kept_and_old_versions_are_left_alone(fake, cls, arguments):
    pipeline = fake(cls)(*arguments)
    expected = draw(cls(*arguments), 1)
    patches.apply()
    assert draw(pipeline, 1) == expected


@pytest.mark.skipif(importlib.util.find_spec('albumentations') is None,
                    reason='albumentations is an optional package')
def test_the_installed_package_follows_the_sample():
    import albumentations
    from mmdet.datasets.transforms import Albu
    own = hasattr(albumentations.Compose, 'set_random_state')
    transform = Albu([
        dict(type='HorizontalFlip', p=0.5),
        dict(type='RandomBrightnessContrast', p=0.5),
        dict(type='OneOf', p=0.9, transforms=[dict(type='Blur', p=1.), dict(type='CLAHE', p=1.)]),
    ])
    image = np.random.RandomState(0).randint(0, 255, (32, 32, 3), np.uint8)

    def outcomes(seeds):
        out = []
        for seed in seeds:
            seed_all(seed)
            out.append(np.ascontiguousarray(transform(dict(img=image.copy()))['img']).tobytes())
        return out

    assert (len(set(outcomes([4] * 6))) > 1) == own
    patches.apply()
    assert len(set(outcomes([4] * 6))) == 1
    assert len(set(outcomes(range(12)))) > 6
    assert outcomes([1, 2, 3]) == outcomes([3, 2, 1])[::-1]


MAX_CELL = 100  # characters of a table cell
ADE = 'mmdet.datasets.ade20k:ADE20KSegDataset.load_data_list'


# --------------------------------------------------------------------------- the table
@pytest.fixture(scope='module', autouse=True)
def everything_imported():
    for patch in patches.PATCHES:
        if patch.module.startswith(('mmdet', 'mmengine')):
            importlib.import_module(patch.module)


@pytest.fixture
def table(monkeypatch):
    return lambda *rows: monkeypatch.setattr(patches, 'PATCHES', rows)


def row(target):
    cause = StockCause('C7', 'a reason', False, '', ())
    return Patch(target, 'mmrepro.patches.methods:sorted_by_path', cause)


def names_of(rows):
    return [patch.target for patch in rows]


def entry(patch):
    """Return what the holder of a target has under its name: the object itself, or 'nothing'."""
    if patch.module not in sys.modules:
        return None
    owner, name = patches._locate(patch, sys.modules[patch.module])
    return vars(owner).get(name, 'nothing') if owner is not None else None


def test_every_row_is_well_formed():
    assert len(set(names_of(patches.PATCHES))) == len(patches.PATCHES)
    for patch in patches.PATCHES:
        module, _, function = patch.replacement.partition(':')
        assert callable(getattr(importlib.import_module(module), function))


def test_the_page_of_causes_shows_the_table_and_every_cell_fits_a_line():
    for cause in patches.CAUSES:
        assert 0 < len(cause.why) <= MAX_CELL and '|' not in cause.why, cause
    for note in NOTES.values():
        assert all(0 < len(cell) <= MAX_CELL and '|' not in cell for cell in note[:3]), note
    page = (ROOT / 'docs' / 'results' / 'replaced_parts.md').read_text(encoding='utf-8')
    assert len(NOTES) == len(patches.CAUSES) and entries() in page
    causes = (ROOT / 'docs' / 'reference' / 'causes.md').read_text(encoding='utf-8')
    assert [cause.id for cause in patches.CAUSES if f'**{cause.id}**' not in causes] == []


def test_every_row_applies_to_the_installed_mmdetection(recwarn):
    in_force = names_of(patches.apply())
    absent = [name for name in names_of(patches.PATCHES) if name not in in_force]
    # a foreign package is looked up only where MMDetection could import it
    assert not [name for name in absent if name.startswith(('mmdet', 'mmengine'))]
    assert not [w for w in recwarn if 'is not covered' in str(w.message)]


def test_applying_twice_changes_nothing_more_and_revert_restores_the_very_objects():
    before = [entry(patch) for patch in patches.PATCHES]
    patches.apply()
    once = [entry(patch) for patch in patches.PATCHES]
    assert any(one is not b for one, b in zip(once, before))
    assert patches.apply() == patches.applied()
    assert all(entry(p) is one for p, one in zip(patches.PATCHES, once))
    patches.revert()
    assert all(entry(p) is b for p, b in zip(patches.PATCHES, before))
    assert patches.applied() == ()


def test_stock_streams_leave_the_data_streams_alone_whatever_an_earlier_run_put_in():
    stock = patches.apply(stock_streams=True)
    everything = patches.apply()
    assert stock and not any(patch.cause.affects_data for patch in stock)
    assert patches.apply(stock_streams=True) == stock == patches.applied()
    assert patches.apply() == everything


def own_module(tmp_path, monkeypatch, name, text):
    (tmp_path / f'{name}.py').write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    return name


LOADER = 'class Loader:\n    def load_data_list(self):\n        return []\n'


def test_a_row_waits_for_the_import_of_its_module(table, tmp_path, monkeypatch):
    name = own_module(tmp_path, monkeypatch, 'a_library_of_test_patches', LOADER)
    table(row(f'{name}:Loader.load_data_list'))
    assert patches.apply() == () and name not in sys.modules
    for _ in range(2):  # the second time as after a reload in a notebook
        kind = importlib.import_module(name).Loader
        assert hasattr(kind.load_data_list, '__wrapped__') and len(patches.applied()) == 1
        del sys.modules[name]
    patches.revert()
    assert not hasattr(importlib.import_module(name).Loader.load_data_list, '__wrapped__')


OTHER_SCOPE = """
import pathlib, sys
from mmengine.registry import TRANSFORMS
from mmengine.runner import Runner
from small_runs import config
from mmrepro import ops
deterministic = dict(seed=1, deterministic=True)
Runner.from_cfg(config(pathlib.Path(sys.argv[1]), randomness=deterministic))
print('mmdet' in sys.modules)
mosaic = TRANSFORMS.build(dict(type='mmdet.CachedMosaic'))
print(hasattr(type(mosaic).transform, '__wrapped__'), ops.provider())
"""


@pytest.mark.slow
def test_scope_and_imports_at_the_start_do_not_matter(tmp_path):
    """As configs of another library, which take single transforms from MMDetection."""
    said = python('-c', OTHER_SCOPE, tmp_path)
    assert said.split('\n')[-3:-1] == ['False', 'True auto']


def test_without_mmdetection_there_is_nothing_to_do(monkeypatch):
    for patch in patches.PATCHES:
        monkeypatch.setitem(sys.modules, patch.module, None)
    assert patches.apply() == ()


@pytest.mark.parametrize('target', [
    'mmdet.no_such_package.module:Class.method',
    'mmdet.datasets.ade20k:NoSuchClass.method',
    'no_such_package.module:Class.method',
])
def test_what_this_version_does_not_have_is_left_out(table, target):
    table(row(target), row(ADE))
    assert names_of(patches.apply()) == [ADE]


def test_a_renamed_method_is_reported(table):
    table(row('mmdet.datasets.ade20k:ADE20KSegDataset.load_everything'))
    with pytest.warns(RuntimeWarning, match=r'load_everything .* cause C7 is not covered'):
        assert patches.apply() == ()


def test_revert_respects_a_later_replacement(table, monkeypatch):
    from mmdet.datasets.ade20k import ADE20KSegDataset
    monkeypatch.setattr(ADE20KSegDataset, 'load_data_list', ADE20KSegDataset.load_data_list)
    table(row(ADE))
    patches.apply()
    ADE20KSegDataset.load_data_list = len
    with pytest.warns(RuntimeWarning, match='replaced again by other code'):
        patches.revert()
    assert ADE20KSegDataset.load_data_list is len


def test_names_and_docstrings_stay():
    from mmdet.datasets.ade20k import ADE20KSegDataset
    stock_method = ADE20KSegDataset.load_data_list
    patches.apply()
    method = ADE20KSegDataset.load_data_list
    assert method is not stock_method
    for name in ('__qualname__', '__doc__', '__module__'):
        assert getattr(method, name) == getattr(stock_method, name)
    assert method.__wrapped__ is stock_method


class SeesReplacement(torch.utils.data.Dataset):
    """Items tell whether the process that makes them has the replacement of a class's method."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return hasattr(self.kind.load_data_list, '__wrapped__')


@pytest.mark.slow
def test_spawned_workers_get_the_replacements():
    from mmdet.datasets.ade20k import ADE20KSegDataset
    loader = torch.utils.data.DataLoader(
        SeesReplacement(ADE20KSegDataset), num_workers=1, multiprocessing_context='spawn',
        worker_init_fn=WorkerInit(LoaderPosition(0), 0, patches.apply))
    assert [bool(item) for item in loader] == [True]
