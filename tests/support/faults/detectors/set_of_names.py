"""A dataset that drops images named twice through a set, and so orders them by their hashes."""
from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS


@DATASETS.register_module()
class UniqueCoco(CocoDataset):
    def load_data_list(self):
        entries = {entry['img_path']: entry for entry in super().load_data_list()}
        return [entries[name] for name in set(entries)]
