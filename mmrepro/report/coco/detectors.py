"""Which files of predictions belong to which detector, and their matches."""
from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from typing import Callable

from ...errors import PredictionError
from .matches import Matches, match
from .predictions import load_annotations, load_predictions

OF_A_STUDY = os.path.join('seed_*', 'predictions.pkl')


def files_of(words: Sequence[str]) -> dict[str, list[str]]:
    """Label of each detector -> its files, one for each seed.

    A word is ``FILE[,FILE...]``, the folder of a config in a study (``seed_N/predictions.pkl`` in
    it), or either with ``LABEL=`` before it.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        label, equals, names = word.partition('=')
        names = names if equals else word
        if os.path.isdir(names):
            files = sorted(glob.glob(os.path.join(glob.escape(names), OF_A_STUDY)),
                           key=lambda path: (len(path), path))
            if not files:
                raise PredictionError(f'{names}: has no {OF_A_STUDY}')
        else:
            files = names.split(',')
        if not equals:
            label = os.path.basename(os.path.normpath(names if os.path.isdir(names) else files[0]))
            label = label if os.path.isdir(names) else os.path.splitext(label)[0]
        if label in found:
            raise PredictionError(f'two detectors are called {label}; name them: '
                                  f'--predictions a={names} b=...')
        found[label] = files
    return found


def load(words: Sequence[str], annotations: str, iou_type: str,
         say: Callable[[str], None] = lambda text: None) -> dict[str, list[Matches]]:
    """Label of each detector -> the matches of each seed."""
    files = files_of(words)
    truth = load_annotations(annotations)
    earlier: dict[str, str] = {}
    found: dict[str, list[Matches]] = {}
    for label, paths in files.items():
        found[label] = []
        for path in paths:
            say(f'matching {path}')
            predictions = load_predictions(path, truth, iou_type)
            content = hashlib.sha256(repr(
                [(one['image_id'], one['category_id'], one['score'], one['bbox'],
                  one['segmentation'])
                 for one in predictions.dataset['annotations']]).encode()).hexdigest()
            if content in earlier:
                raise PredictionError(f'{earlier[content]} and {path} hold the same predictions; '
                                      'are they two runs of one seed?')
            earlier[content] = path
            found[label].append(match(truth, predictions, iou_type))
    return found
