"""Stands for fresh processes: what was asked of them."""
from __future__ import annotations

import json
import os

from mmrepro.runs.child import Training


def training_of(launch):
    """The training that a launch of mmrepro.runs.child makes."""
    module, given = launch.command
    assert module == 'mmrepro.runs.child'
    return Training(**json.loads(given))


def folder_of(launch):
    return os.path.dirname(launch.log)
