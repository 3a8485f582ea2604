#!/usr/bin/env bash
# mmdet 3.3.0: the label of a box is the rank of its category in the annotation file, among those that
# `metainfo['classes']` names, and not its place in `classes`. A class that the file lacks shifts the
# labels behind it, and another order of `classes` exchanges names; nothing is said in either case.
# A model then trains well and calls every car a bicycle.
#
# Behaviour seen with mmdet 3.3.0, mmengine 0.10.7, mmcv-lite 2.1.0, pycocotools 2.0.11, torch 2.13.0:
#   classes person, car, dog            person->person car->car dog->dog
#   classes person, bicycle, car, dog   person->person car->bicycle dog->car
#   classes dog, car, person            person->dog car->car dog->person
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet torch==2.13.0 mmdet==3.3.0 mmengine==0.10.7 mmcv-lite==2.1.0 \
    pycocotools==2.0.11 'setuptools<82'
cat > look.py <<'END'
import contextlib
import io
import json
import sys
import types


class NotCalled(types.ModuleType):
    """The compiled operators of mmcv, of which loading annotations needs none."""

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return lambda *args, **kwargs: sys.exit(f'{name} was called')


sys.modules['mmcv._ext'] = NotCalled('mmcv._ext')
from mmdet.datasets import CocoDataset

names = 'person', 'car', 'dog'
with open('boxes.json', 'w') as file:
    json.dump(dict(
        images=[dict(id=1, file_name='a.jpg', width=90, height=90)],
        categories=[dict(id=number, name=name) for number, name in enumerate(names, 1)],
        annotations=[dict(id=number, image_id=1, category_id=number, bbox=[9 * number, 5, 30, 30],
                          area=900, iscrowd=0) for number in (1, 2, 3)]), file)
for classes in (names, ('person', 'bicycle', 'car', 'dog'), ('dog', 'car', 'person')):
    with contextlib.redirect_stdout(io.StringIO()):
        data = CocoDataset(ann_file='boxes.json', metainfo=dict(classes=classes), pipeline=[],
                           data_prefix=dict(img=''))
    boxes = data.get_data_info(0)['instances']
    print(', '.join(classes) + ':', *(
        f"{name}->{classes[box['bbox_label']]}" for name, box in zip(names, boxes)))
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
person, car, dog: person->person car->car dog->dog
person, bicycle, car, dog: person->person car->bicycle dog->car
dog, car, person: person->dog car->car dog->person
END
