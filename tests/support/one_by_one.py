"""A detector whose predictions for an image cannot depend on its batch."""
from mmdet.models import RTMDet
from mmengine.registry import MODELS


@MODELS.register_module(force=True)
class OneByOne(RTMDet):
    def predict(self, batch_inputs, batch_data_samples, rescale=True):
        return [super(OneByOne, self).predict(one[None].clone(), [sample], rescale)[0]
                for one, sample in zip(batch_inputs, batch_data_samples)]
