"""The weights of one Gated DeltaNet layer that its attention needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdn.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerParams:
    """Parameters of one layer, referenced and not copied: weights updated in place are seen at the next call.

    Attributes:
        conv_weight: `[dim, W]`; `[dim, 1, W]`, as `torch.nn.Conv1d` holds it, is accepted.
        A_log: `[HV]`, fp32 or the activation dtype.
        dt_bias: `[HV]`, fp32 or the activation dtype.
        bias: `[dim]` of the convolution, or None.
        activation: of the convolution: "silu", "swish" or None.
        layer_id: the layer's place in the pool, counted from 0 over its Gated DeltaNet layers only.
    """

    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    bias: Tensor | None = None
    activation: str | None = "silu"
    layer_id: int = 0

    def __post_init__(self) -> None:
        if self.layer_id < 0:
            raise InputError(f"layer_id: expected a number from 0, got {self.layer_id}")
        if self.conv_weight.dim() == 3:
            object.__setattr__(self, "conv_weight", self.conv_weight.squeeze(1))
