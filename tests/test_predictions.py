"""On what the predictions for an image depend: its batch, and with one setting nothing else."""
import json

import infer_fresh
import pytest
import torch
from demo_runs import changed, initialised
from harness import Child, python
from infer_fresh import digest_of
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS
from mmengine.runner import Runner
from small_runs import config, validating

from mmrepro.errors import RandomnessError

DETECTORS = dict(one_stage='retinanet_r50_fpn', two_stage='faster-rcnn_r50_fpn',
                 transformer='deformable-detr_r50')


@METRICS.register_module(force=True)
class DigestsOfImages(BaseMetric):
    def process(self, data_batch, data_samples):
        from mmdet.structures import DetDataSample
        from mmengine.structures import InstanceData
        self.results += [(one['img_id'], digest_of(DetDataSample(pred_instances=InstanceData(
            **one['pred_instances'])))) for one in data_samples]

    def compute_metrics(self, results):
        return {str(image): digest for image, digest in results}


@pytest.fixture(scope='module', params=[
    pytest.param(name, marks=[] if name == 'two_stage' else pytest.mark.nightly)
    for name in DETECTORS])
def paths(request, data_root, tmp_path_factory):
    return initialised(DETECTORS[request.param], data_root, tmp_path_factory.mktemp('detectors'))


def predictions(cfg, folder, order, batch_size, phase='test', **randomness):
    def change(cfg):
        cfg.work_dir = str(folder)
        cfg.randomness.update(randomness)
        loader = cfg[f'{phase}_dataloader']
        loader.update(batch_size=batch_size, num_workers=0, persistent_workers=False)
        loader.dataset.indices = order
        cfg[f'{phase}_evaluator'] = dict(type='DigestsOfImages')

    runner = Runner.from_cfg(changed(cfg, change))
    return runner.test() if phase == 'test' else runner.val()


def test_a_prediction_depends_on_its_batch_and_with_the_setting_on_nothing(paths, tmp_path):
    path, weights = paths
    cfg = Config.fromfile(path)
    cfg.load_from = weights

    def job():
        alone = predictions(cfg, tmp_path, [0, 1, 2, 3, 4], 1)
        batch = predictions(cfg, tmp_path, [0, 1, 2, 3, 4], 5)
        others = [predictions(cfg, tmp_path, order, size, phase, independent_predictions=True)
                  for order, size, phase in (([4, 3, 2, 1, 0], 3, 'test'), ([3, 1], 2, 'val'))]
        return alone, batch, others

    alone, batch, (turned, few) = Child(job).result()
    assert len(alone) == 5 and any(count for _, count in alone.values())
    # padding to the largest image, and kernels that add in another order for another batch
    assert batch != alone
    assert turned == alone
    assert len(few) == 2 and few.items() <= alone.items()


@METRICS.register_module(force=True)
class Drawn(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(torch.rand(1).item().hex())

    def compute_metrics(self, results):
        return dict(drawn=results)


def drawing(folder, independent, phase):
    cfg = config(folder, randomness=dict(seed=3, independent_predictions=independent))
    runner = Runner.from_cfg(validating(cfg, 'Drawn', (phase, ), batch_size=4))
    return getattr(runner, phase)()['drawn']


def test_every_image_has_the_same_random_numbers(tmp_path):
    assert len(set(drawing(tmp_path, False, 'test'))) == 2
    drawn = drawing(tmp_path, True, 'test')
    assert len(drawn) == 8 and len(set(drawn)) == 1
    assert drawing(tmp_path, True, 'val') == drawn


def test_loaders_whose_batches_are_not_ours_are_refused(tmp_path):
    loader = torch.utils.data.DataLoader([dict(x=torch.zeros(2))] * 4, batch_size=2)
    cfg = config(tmp_path, randomness=dict(seed=3, independent_predictions=True))
    runner = Runner.from_cfg(cfg)
    runner._test_dataloader, runner._test_loop = loader, dict()
    runner._test_evaluator = dict(type='Drawn')
    with pytest.raises(RandomnessError, match=r"stream 'test' has a DataLoader with batch_size=2; "
                       'allowed is 1'):
        runner.test()
    runner._test_dataloader = dict(dataset=dict(type='Points'), batch_sampler=dict(type='Mine'),
                                   sampler=dict(type='DefaultSampler'), batch_size=2)
    with pytest.raises(RandomnessError, match="batch_sampler={'type': 'Mine'}; remove it"):
        runner.test()


def fresh(path, weights, images, hash_seed):
    said = python(infer_fresh.__file__, path, weights, *images, PYTHONHASHSEED=hash_seed)
    return json.loads(said.splitlines()[-1])


def test_inference_repeats_in_any_process_and_order(paths, data_root):
    data = Config.fromfile(paths[0]).test_dataloader.dataset
    with open(f'{data_root}/{data.ann_file}') as file:
        names = [one['file_name'] for one in json.load(file)['images'][:3]]
    images = [f'{data_root}/{data.data_prefix.img}/{name}' for name in names]
    first = fresh(*paths, images, '1')
    assert first == fresh(*paths, images[::-1], '2')
    assert set(first) == {'by_inferencer', 'by_function', 'with_augmentation'}
    for way, digests in first.items():
        assert len({digest for digest, _ in digests.values()}) == 3, way
        assert all(count for _, count in digests.values()), way
    assert first['by_inferencer'] == first['by_function'] != first['with_augmentation']
