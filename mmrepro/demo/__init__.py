"""The demonstration: a dataset of real photographs, a classifier, shipped configs."""
from .dataset import CLASSES, data_digest, write_dataset
from .shipped_configs import demo_config, use_data
