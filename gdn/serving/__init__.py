"""The serving layer: what a server needs between its model runner and the operations. Needs torch."""

from gdn.serving.allocator import SlotAllocator
from gdn.serving.attention import GdnAttention
from gdn.serving.batch import Batch
from gdn.serving.parameters import LayerParams
from gdn.serving.pool import StatePool

__all__ = ["Batch", "GdnAttention", "LayerParams", "SlotAllocator", "StatePool"]
