"""What a layer of ours promises so that examples can be protected one by one, at the cost of one pass over the batch."""

from __future__ import annotations

from torch import nn


class ExampleWise(nn.Module):
    """A layer of one input and one output, (B, ...) each, whose output for an example is a function of that example's input and
    of parameters that the layer holds itself (not in children).

    Its forward is made of operations that `torch.func` can batch: no branch on values, nothing random, nothing in place.
    `learning/training/per_example.py` makes each example's gradient by the layer's own backward pass over that example alone.
    """
