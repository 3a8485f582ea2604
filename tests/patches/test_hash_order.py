"""What depends on the hashes of strings, seen from two interpreters with different hashes.

Run as a script, this file prints the digests of one interpreter; as a test it compares two.
"""
import hashlib
import json
import random

import numpy as np
import pytest
from harness import python

HASH_SEEDS = ('0', '1')
NAMES = {str(i): name for i, name in enumerate(
    'cat dog horse sheep cow bear zebra giraffe bird boat bus car chair couch table lamp clock '
    'vase book cup fork knife spoon bowl'.split())}


class Words:
    @staticmethod
    def tokenize(text):
        return text.split()


def sampled_text():
    """Caption and labels of a sample, as MM-Grounding-DINO's text sampling makes them."""
    from mmdet.datasets.transforms.text_transformers import RandomSamplingNegPos
    transform = RandomSamplingNegPos.__new__(RandomSamplingNegPos)
    transform.__dict__.update(tokenizer=Words, num_sample_negative=20, full_sampling_prob=0.5,
                              max_tokens=256, label_map=None)
    random.seed(3)
    np.random.seed(3)
    results = transform(
        dict(text=dict(NAMES), gt_bboxes=np.zeros((3, 4)), gt_bboxes_labels=np.array([2, 7, 2])))
    return repr((results['text'], results['tokens_positive'], results['gt_bboxes_labels'].tolist()))


def fields_of_elements():
    """Return the names of data and meta fields, in order, and what a dump holds."""
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData
    sample = DetDataSample(metainfo=dict(img_path='a', img_id=1, ori_shape=(2, 2), flip=False))
    sample.gt_instances = InstanceData(bboxes=[0], labels=[1], scores=[2], masks=[3])
    sample.pred_instances = InstanceData(labels=[1], scores=[2])
    names = sample.keys(), sample.metainfo_keys(), sample.clone().all_keys()
    return repr((names, sample.to_dict()))


def groups_of_a_batch():
    """Tags of a semi-supervised batch, in the order in which a detector visits them."""
    import torch
    from mmdet.utils import split_batch
    metas = [dict(tag=tag) for tag in ('unsup_teacher', 'sup', 'unsup_student', 'sup', 'extra')]
    return repr(list(split_batch(torch.zeros(5, 1), metas, {})))


PROBES = {'text': sampled_text, 'fields': fields_of_elements, 'groups': groups_of_a_batch}


def digests():
    return {name: hashlib.sha256(probe().encode()).hexdigest() for name, probe in PROBES.items()}


def main():
    import mmrepro.patches
    stock = digests()
    mmrepro.patches.apply()
    print(json.dumps(dict(stock=stock, patched=digests())))


@pytest.fixture(scope='module')
def outcomes():
    return [json.loads(python(__file__, PYTHONHASHSEED=seed).splitlines()[-1])
            for seed in HASH_SEEDS]


@pytest.mark.parametrize('state', ['patched', 'stock'])
@pytest.mark.parametrize('name', PROBES)
@pytest.mark.nightly
def test_hash_seed_matters_to_stock_mmdetection_only(outcomes, name, state):
    # if 'stock' fails, the cause is gone upstream and its row can go too
    assert (len({outcome[state][name] for outcome in outcomes}) > 1) is (state == 'stock')


if __name__ == '__main__':
    main()
