"""The operators of ``mmcv._ext`` in PyTorch, one module per family.

Every operator raises RuntimeError, which names it and the argument, if shapes or dtypes do not
match. Operators of RoIs (:mod:`.rois`) share these arguments:

* rois: (K, 5): image index, x1, y1, x2, y2 in pixels of the image;
* spatial_scale: pixels of the map per pixel of the image;
* sampling_ratio: samples per bin and axis; 0 or less: one per started pixel;
* aligned: subtract half a pixel; without it boxes are at least 1 x 1 pixels.
"""
