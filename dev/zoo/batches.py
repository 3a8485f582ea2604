"""Batches of detectors that train on more than labelled images."""
from __future__ import annotations

import copy

import torch

__all__ = ['tracks', 'unlabelled', 'with_proposals']


def with_proposals(batch: dict) -> dict:
    """Return the batch with proposals near the boxes, as Fast R-CNN reads them from a file."""
    from mmengine.structures import InstanceData
    for sample in batch['data_samples']:
        boxes = sample.gt_instances.bboxes.tensor
        size = sample.img_shape[0]
        near = torch.cat([boxes, boxes + 3, boxes - 5, boxes.flip(0) + size / 4])
        sample.proposals = InstanceData(bboxes=near.clamp(0, size), scores=near.new_ones(len(near)))
    return batch


def unlabelled(batch: dict) -> dict:
    """Return a semi-supervised batch: labeled images, and unlabeled images in two views."""
    names = ('sup', 'unsup_teacher', 'unsup_student')
    return dict(inputs={name: list(batch['inputs']) for name in names},
                data_samples={name: copy.deepcopy(batch['data_samples']) for name in names})


def tracks(batch: dict) -> dict:
    """Return a batch of a video: the key frame and its reference frames."""
    from mmdet.structures import TrackDataSample
    video = TrackDataSample()
    video.video_data_samples = batch['data_samples']
    for number, frame in enumerate(video.video_data_samples):
        frame.set_metainfo(dict(frame_id=number, is_video_data=True))
        # LoadTrackAnnotations leaves arrays, and the preprocessor of videos converts nothing
        for part in (frame.gt_instances, frame.ignored_instances):
            part.bboxes = part.bboxes.tensor
    video.set_metainfo(dict(key_frames_inds=[0], ref_frames_inds=[1]))
    return dict(inputs=[torch.stack(batch['inputs'])], data_samples=[video])
