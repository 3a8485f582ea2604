"""Evaluate small predictions with MMDetection's metrics, and print the bits of every value.

Predictions have tied scores and overlapping boxes. Called with ``--order N``, the images come in
another order; ``--cores N`` is what the machine says it has.
"""
import argparse
import importlib
import io
import json
import multiprocessing
import os
import pickle
import random
import tempfile
from contextlib import redirect_stdout

import numpy as np
import pycocotools.mask
import torch
from PIL import Image

np.float = float  # which LVIS and YouTube-VIS take from NumPy; it is gone from NumPy 1.24

IMAGES, BOXES, PREDICTED, SIZE = 16, 6, 40, 96
CLASSES = ('cat', 'cup', 'coin')


def boxes(rng, count):
    corner = rng.random((count, 2)) * SIZE / 2
    return np.concatenate([corner, corner + 4 + rng.random((count, 2)) * SIZE / 3], 1)


def masks_of(found):
    masks = np.zeros((len(found), SIZE, SIZE), bool)
    for mask, (x, y, right, below) in zip(masks, found.astype(int)):
        mask[y:below, x:right] = True
    return masks


def encoded(found):
    return [pycocotools.mask.encode(np.asfortranarray(mask.astype(np.uint8)))
            for mask in masks_of(found)]


class Data:
    """Images with boxes, masks and predictions near them, as metrics get them."""

    def __init__(self, order):
        rng = np.random.default_rng(3)
        self.truth, self.predicted = [], []
        for _ in range(IMAGES):
            real = boxes(rng, BOXES)
            near = real[rng.integers(0, BOXES, PREDICTED)] + rng.normal(0, 3, (PREDICTED, 4))
            self.truth.append((real, rng.integers(0, 3, BOXES)))
            # three scores only, so that most are ties
            self.predicted.append((near.clip(0, SIZE - 1), rng.integers(0, 3, PREDICTED),
                                   rng.integers(1, 4, PREDICTED) / 4))
        self.order = list(range(IMAGES))
        if order:
            random.Random(order).shuffle(self.order)

    def coco(self, folder, **more):
        annotations = []
        for image, (real, labels) in enumerate(self.truth):
            for box, label, coded in zip(real, labels, encoded(real)):
                x, y, right, below = map(float, box)
                annotations.append(dict(
                    id=len(annotations) + 1, image_id=image, category_id=int(label), iscrowd=0,
                    bbox=[x, y, right - x, below - y], area=(right - x) * (below - y),
                    segmentation=dict(coded, counts=coded['counts'].decode())))
        path = os.path.join(folder, 'ann.json')
        with open(path, 'w') as file:
            json.dump(dict(
                images=[dict(id=i, width=SIZE, height=SIZE, file_name=f'{i:04}.png', **more)
                        for i in range(IMAGES)],
                annotations=annotations,
                categories=[dict(id=i, name=name) for i, name in enumerate(CLASSES)]), file)
        return path

    def samples(self, **more):
        """Return data samples in order, each with the ground truth beside the predictions."""
        found = []
        for image in self.order:
            (real, labels), (near, guessed, scores) = self.truth[image], self.predicted[image]
            found.append(dict(
                img_id=image, img_path=f'{image:04}.png', ori_shape=(SIZE, SIZE),
                pred_instances=dict(
                    bboxes=torch.tensor(near, dtype=torch.float32), labels=torch.tensor(guessed),
                    scores=torch.tensor(scores, dtype=torch.float32),
                    masks=torch.tensor(masks_of(near))),
                gt_instances=dict(bboxes=torch.tensor(real, dtype=torch.float32),
                                  labels=torch.tensor(labels), masks=None),
                ignored_instances=dict(bboxes=torch.zeros(0, 4), labels=torch.zeros(0).long()),
                **more))
        return found


def evaluated(metric, samples, **meta):
    metric.dataset_meta = dict(classes=CLASSES, **meta)
    for sample in samples:
        metric.process({}, [sample])
    return metric.evaluate(len(samples))


def coco(data, folder, name, **options):
    from mmdet.evaluation import metrics
    return evaluated(getattr(metrics, name)(ann_file=data.coco(folder), **options),
                     data.samples())


def coco_metric(data, folder):
    return coco(data, folder, 'CocoMetric', metric=['bbox', 'segm', 'proposal', 'proposal_fast'])


def occluded(data, folder):
    found = []
    for image, (real, labels) in enumerate(data.truth):
        for box, label, coded in zip(real, labels, encoded(real)):
            found.append((f'{image:04}.png', CLASSES[label], None, [*map(float, box)], coded))
    paths = [os.path.join(folder, f'{name}.pkl') for name in ('occluded', 'separated')]
    for path in paths:
        with open(path, 'wb') as file:
            pickle.dump(found, file)
    return coco(data, folder, 'CocoOccludedSeparatedMetric', occluded_ann=paths[0],
                separated_ann=paths[1], iou_thr=0.5)


def open_vocabulary(data, folder):
    from mmdet.evaluation.metrics import OVCocoMetric
    metric = OVCocoMetric(ann_file=data.coco(folder))
    return evaluated(metric, data.samples(), base_classes=CLASSES[:2], novel_classes=CLASSES[2:])


def voc(data, folder):
    from mmdet.evaluation.metrics import VOCMetric
    results = {}
    for mode in ('area', '11points'):
        found = evaluated(VOCMetric(iou_thrs=[0.5, 0.7], eval_mode=mode), data.samples(),
                          dataset_type='VOC2012')
        results.update((f'{mode} {key}', value) for key, value in found.items())
    return results


def open_images(data, folder):
    from mmdet.evaluation.metrics import OpenImagesMetric
    samples = data.samples()
    for sample in samples:
        truth = sample['gt_instances']
        sample['instances'] = [dict(bbox=box.tolist(), bbox_label=int(label), is_group_of=i % 2)
                               for i, (box, label) in enumerate(zip(truth['bboxes'],
                                                                    truth['labels']))]
        sample['image_level_labels'] = np.arange(3)
    return evaluated(OpenImagesMetric(iou_thrs=[0.5], ioa_thrs=[0.5], get_supercategory=False,
                                      filter_labels=False), samples,
                     RELATION_MATRIX=np.eye(3))


def lvis(data, folder):
    importlib.import_module('lvis')  # MMDetection raises a RuntimeError where it is missing
    from mmdet.evaluation.metrics import LVISMetric
    path = data.coco(folder, neg_category_ids=[], not_exhaustive_category_ids=[], coco_url='')
    with open(path) as file:
        content = json.load(file)
    for one, frequency in zip(content['categories'], 'rcf'):
        one.update(frequency=frequency, id=one['id'] + 1)
    for one in content['annotations']:
        one['category_id'] += 1
    with open(path, 'w') as file:
        json.dump(content, file)
    return evaluated(LVISMetric(ann_file=path, metric=['bbox', 'segm']), data.samples())


def cityscapes(data, folder):
    importlib.import_module('cityscapesscripts')  # as for LVIS
    from mmdet.evaluation.metrics import CityScapesMetric
    classes = ('person', 'car', 'bicycle')
    ids = (24, 26, 33)  # of these classes
    metric = CityScapesMetric(os.path.join(folder, 'found'), seg_prefix=folder)
    samples = data.samples()
    for sample in samples:
        real, labels = data.truth[sample['img_id']]
        instances = np.zeros((SIZE, SIZE), np.uint16)
        for number, (mask, label) in enumerate(zip(masks_of(real), labels)):
            instances[mask] = ids[label] * 1000 + number
        sample['img_path'] = os.path.join(folder, f'{sample["img_id"]}_leftImg8bit.png')
        Image.fromarray(instances).save(
            os.path.join(folder, f'{sample["img_id"]}_gtFine_instanceIds.png'))
    metric.dataset_meta = dict(classes=classes)
    for sample in samples:
        metric.process({}, [sample])
    return metric.evaluate(len(samples))


def crowd_human(data, folder):
    from mmdet.evaluation.metrics import CrowdHumanMetric
    path = os.path.join(folder, 'ann.odgt')
    with open(path, 'w') as file:
        for image in data.order:
            real, _ = data.truth[image]
            people = [dict(tag='person', fbox=[x, y, right - x, below - y],
                           hbox=[x, y, 2, 2], extra={}, head_attr={})
                      for x, y, right, below in real.tolist()]
            file.write(json.dumps(dict(ID=f'{image:04}', gtboxes=people)) + '\n')
    samples = data.samples()
    for sample in samples:
        sample['pred_instances']['labels'] = torch.zeros(PREDICTED, dtype=torch.long)
        sample['img_id'] = f'{sample["img_id"]:04}'
    return evaluated(CrowdHumanMetric(ann_file=path, metric=['AP', 'MR', 'JI']), samples)


def panoptic(data, folder):
    """Two categories in six segments an image; predictions lie next to them."""
    from mmdet.evaluation.functional import pq_compute_multi_core
    from panopticapi.utils import id2rgb
    pairs = []
    for image in data.order:
        pair = []
        for kind, number in (('truth', 0), ('found', image % 7)):
            names = np.arange(1, 7)[:, None].repeat(SIZE // 6, 0).repeat(SIZE, 1)
            names = np.roll(np.pad(names, ((0, SIZE - len(names)), (0, 0))), number, 0)
            segments = [dict(id=one, category_id=one % 2, iscrowd=0, area=int((names == one).sum()))
                        for one in range(1, 7)]
            name = f'{kind}_{image}.png'
            Image.fromarray(id2rgb(names)).save(os.path.join(folder, name))
            pair.append(dict(file_name=name, image_id=image, segments_info=segments))
        pairs.append(tuple(pair))
    categories = {0: dict(id=0, isthing=1), 1: dict(id=1, isthing=0)}
    found = pq_compute_multi_core(pairs, folder, folder, categories)
    return {f'{which}.{name}': value for which, things in (('all', None), ('things', True))
            for name, value in found.pq_average(categories, isthing=things)[0].items()}


def segmentation(data, folder):
    from mmdet.evaluation.metrics import SemSegMetric
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randint(0, 3, (2, 1, SIZE, SIZE), generator=generator) for _ in data.order]
    samples = [dict(pred_sem_seg=dict(sem_seg=draws[i][0]), gt_sem_seg=dict(sem_seg=draws[i][1]))
               for i in data.order]
    return evaluated(SemSegMetric(iou_metrics=['mIoU', 'mDice', 'mFscore']), samples,
                     label2cat=dict(enumerate(CLASSES)))


def referred(data, folder):
    from mmdet.evaluation.metrics import RefSegMetric
    from mmdet.structures.mask import BitmapMasks
    samples = data.samples()
    for sample in samples:
        real, _ = data.truth[sample['img_id']]
        shown = np.concatenate([masks_of(real)] * PREDICTED)[:PREDICTED]
        sample['gt_masks'] = BitmapMasks(shown.astype(np.uint8), SIZE, SIZE)
    return evaluated(RefSegMetric(metric=['cIoU', 'mIoU']), samples)


def one_box(data, folder):
    path = data.coco(folder)
    with open(path) as file:
        content = json.load(file)
    names = ('refcoco', 'refcoco+', 'refcocog')
    for image in content['images']:
        image['dataset_name'] = names[image['id'] % 3]
    content['annotations'] = content['annotations'][::BOXES]
    with open(path, 'w') as file:
        json.dump(content, file)
    return path


def expression(data, folder):
    from mmdet.evaluation.metrics import RefExpMetric
    return evaluated(RefExpMetric(ann_file=one_box(data, folder)), data.samples())


def expressions(data, folder):
    from mmdet.evaluation.metrics import gRefCOCOMetric
    path = data.coco(folder)
    with open(path) as file:
        content = json.load(file)
    for annotation in content['annotations'][::BOXES][:4]:
        annotation['category_id'] = -1
    with open(path, 'w') as file:
        json.dump(content, file)
    return evaluated(gRefCOCOMetric(ann_file=path, thresh_f1=0.1, iou_thrs=0.3), data.samples())


def described(data, folder):
    from mmdet.evaluation.metrics import DODCocoMetric
    path = data.coco(folder)
    with open(path) as file:
        content = json.load(file)
    for one, words in zip(content['categories'], (2, 5, 12)):
        one['name'] = ' '.join(['word'] * words)
    content['categories'].append(dict(id=3, name=' '.join(['word'] * 8)))
    for annotation in content['annotations'][::7]:
        annotation['category_id'] = 3
    with open(path, 'w') as file:
        json.dump(content, file)
    return evaluated(DODCocoMetric(ann_file=path), data.samples(sent_ids=np.arange(3)))


def phrases(data, folder):
    from mmdet.evaluation.metrics import Flickr30kMetric
    samples = data.samples(phrases=list(CLASSES))
    for sample in samples:
        truth = sample['gt_instances']
        truth['bboxes'] = truth['bboxes'].numpy()
        sample['phrase_ids'] = [0, 1, 2] * (BOXES // 3)
    return evaluated(Flickr30kMetric(), samples)


def reid(data, folder):
    from mmdet.evaluation.metrics import ReIDMetrics
    from mmdet.structures import ReIDDataSample
    generator = torch.Generator().manual_seed(1)
    features = torch.randint(0, 2, (64, 16), generator=generator).float()  # many equal distances
    features[:32] += torch.randn(32, 16, generator=generator)
    samples = []
    for i in range(64):
        sample = ReIDDataSample(metainfo=dict(img_id=i))
        sample.pred_feature = features[i]
        sample.set_gt_label(i % 4)
        samples.append(sample.to_dict())
    return evaluated(ReIDMetrics(), samples)


def videos(data, folder):
    from mmdet.evaluation.metrics import YouTubeVISMetric
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData
    metric = YouTubeVISMetric()
    metric.dataset_meta = dict(classes=CLASSES)
    metric.results, frames = [], 4
    samples = Data(0).samples()
    order = list(range(0, IMAGES, frames))
    if data.order != sorted(data.order):
        order.reverse()
    for first in order:
        shown = []
        for frame, sample in enumerate(samples[first:first + frames]):
            real, labels = data.truth[sample['img_id']]
            instances = [dict(bbox=box.tolist(), bbox_label=int(label), mask=dict(coded),
                              instance_id=first * 10 + number)
                         for number, (box, label, coded) in enumerate(
                             zip(real, labels, encoded(real)))]
            one = DetDataSample(metainfo=dict(
                ori_shape=(SIZE, SIZE), img_id=sample['img_id'], frame_id=frame, ori_video_length=4,
                video_id=first // frames + 1, video_length=frames, instances=instances))
            one.pred_track_instances = InstanceData(
                **sample['pred_instances'], instances_id=torch.arange(PREDICTED))
            shown.append(one)
        metric.process_video(shown)
    return metric.compute_metrics(metric.results)


METRICS = {
    'CocoMetric': coco_metric, 'CocoOccludedSeparatedMetric': occluded,
    'OVCocoMetric': open_vocabulary, 'VOCMetric': voc, 'OpenImagesMetric': open_images,
    'LVISMetric': lvis, 'CityScapesMetric': cityscapes, 'CrowdHumanMetric': crowd_human,
    'CocoPanopticMetric': panoptic, 'SemSegMetric': segmentation,
    'RefSegMetric': referred, 'RefExpMetric': expression, 'gRefCOCOMetric': expressions,
    'DODCocoMetric': described, 'Flickr30kMetric': phrases, 'ReIDMetrics': reid,
    'YouTubeVISMetric': videos}


def exact(value):
    """Return all bits of a number, or of what a dict or list holds."""
    if isinstance(value, dict):
        return {str(key): exact(part) for key, part in value.items()}
    if np.ndim(value):
        return [exact(part) for part in value]
    return float(value).hex()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--order', type=int, default=0)
    parser.add_argument('--cores', type=int, default=2)
    parser.add_argument('--stock', action='store_true')
    parser.add_argument('names', nargs='*')
    args = parser.parse_args()
    multiprocessing.cpu_count = lambda: args.cores
    values = {}
    with redirect_stdout(io.StringIO()):
        if not args.stock:
            from mmrepro import patches
            patches.apply()  # as a run does
        for name in args.names or METRICS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = METRICS[name](Data(args.order), folder)
                except ImportError as error:
                    values[name] = f'not installed: {error.name}'
                    continue
            values[name] = {key: exact(value) for key, value in found.items()}
    print(json.dumps(values))


if __name__ == '__main__':
    main()
