# A checkout finds configs/_base_/reproducible.py through this file; an installed package has a copy
# of that file in this place. So lazy configs write the same path for both.
from mmengine.config import read_base

with read_base():
    from ....configs._base_.reproducible import *
