"""The demonstration: a dataset of real photographs, a classifier, shipped configs."""
from .dataset import CLASSES, data_digest, demo_config, use_data, write_dataset
