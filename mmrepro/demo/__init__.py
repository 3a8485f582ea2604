"""The demonstration: a dataset of real photographs, and two runs of a config."""
from .dataset import CLASSES, data_digest, write_dataset
from .shipped_configs import demo_config, use_data
