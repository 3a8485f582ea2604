"""The dataset of digits, and what the tables of the trainings say."""
import random

import numpy as np

from dev.full_training import digits, report


def row(last, weights, best=None):
    return dict(epochs=[1, 2, 3], mAP=[0.1, best or last, last], weights=weights * 16)


ROWS = {
    'stock': row(.70, 'a'), 'stock, 2 workers': row(.72, 'b'), 'stock, resumed': row(.71, 'c'),
    'mmrepro': row(.73, 'd'), 'mmrepro, 2 workers': row(.73, 'd'),
    'mmrepro, resumed': row(.73, 'd'), 'two threads': row(.74, 'e', best=.75),
    'seed 1': row(.69, 'f')}


def test_equal_runs_have_one_digest_and_no_deviation():
    lines = report.table(dict(tiny=ROWS)).splitlines()
    assert '| mmrepro, the same seed | 3 | 1 | 73.0 | 0 | 2 |' in lines
    # 1.96 to 6.28 is what a table of the chi-squared distribution gives for three values
    assert '| stock, one seed | 3 | 3 | 70.0 to 72.0 | 1.0 (0.5 to 6.3) | 2 |' in lines
    assert ('| mmrepro, another environment | 2 | 2 | 73.0 to 74.0 | 0.7 (0.3 to 22.6) | 2 |'
            in lines)


def test_the_first_of_equal_epochs_is_the_best():
    assert report.best(ROWS['stock']) == 2 and report.best(ROWS['two threads']) == 2


def test_an_image_is_the_same_again_and_its_boxes_hold_the_ink():
    pixels = np.zeros((4, 8, 8), np.uint8)
    pixels[:, 2:6, 3:5] = 255
    made = [digits.compose(random.Random('x 1'), False, pixels, np.arange(4), range(4))
            for _ in range(2)]
    (image, boxes), (again, _) = made
    assert image.shape == (96, 96, 3) and np.array_equal(image, again) and boxes
    other, _ = digits.compose(random.Random('x 1'), True, pixels, np.arange(4), range(4))
    assert not np.array_equal(image, other)  # photographs of validations are others
    for box in boxes:
        x, y, width, height = box['bbox']
        assert 0 <= x < x + width <= 96 and 0 <= y < y + height <= 96 and height > width
        assert box['area'] == width * height
