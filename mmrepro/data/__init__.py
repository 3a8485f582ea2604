"""Data loading as a pure function of the root seed and the position in the sample stream."""
from .loader import adopt_loader, use_stream
from .passes import unfinished
from .samplers import position_of_loader
