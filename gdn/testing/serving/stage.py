"""A model of random layers on one backend, with its pool: where scenarios and hand-made serving tests play."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import Final
from typing import Literal

import torch

from gdn.api import resolve
from gdn.config import GdnConfig
from gdn.serving.attention import GdnAttention
from gdn.serving.batch import Batch
from gdn.serving.pool import StatePool
from gdn.serving.storage import Layout
from gdn.testing.serving.truth import Inputs
from gdn.testing.serving.truth import Truth
from gdn.testing.serving.truth import Weights
from gdn.types import DType

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE: Final[dict[DType, float]] = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest error of an output or a state, by activation dtype, relative to the largest value beside it. A 16-bit
convolution rounds q, k and v, which the simulation doesn't; the recurrence forgets, so errors don't add up."""

Kind = Literal["decode", "extend", "verify"]


class Stage:
    """Random layers over one pool.

    Args:
        config: what to serve; states are fp32, checkpoints are asked for.
        device: as for `gdn.resolve`.
        layers, slots, layout: of the pool.
        seed: of weights and inputs.
        selection: `require`, `prefer`, `exclude` of `gdn.resolve`.
    """

    def __init__(
        self, config: GdnConfig, device: Any, *, layers: int = 3, slots: int = 9, layout: Layout = "slot_major",
        seed: int = 0, **selection: Any,
    ) -> None:  # fmt: skip
        self.config = config.model_copy(update={"state_dtype": "float32", "state_checkpoints": True})
        triple = resolve(self.config, device=device, **selection)
        self.device = triple.device.torch_device
        self.layers = layers
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = StatePool(
            self.config, slots, self.device, num_layers=layers, max_requests=slots + 2, layout=layout,
            contract=triple.state,
        )  # fmt: skip
        self.attention = GdnAttention(triple, self.pool)
        self.weights = Weights.random(self.config, layers, self.generator)
        self.parameters = self.weights.layers(self.device)

    def inputs(self, tokens: int) -> Inputs:
        """Random inputs of every layer, in the activation dtype."""
        return Inputs.random(self.config, self.layers, tokens, self.generator)

    def fresh(self) -> Truth:
        """The simulation of a request that begins."""
        return Truth.fresh(self.weights)

    def forward(self, kind: Kind, batch: Batch, inputs: Sequence[Inputs]) -> Tensor:
        """Outputs `[layers, T, HV, V]` of all layers for the requests' inputs, one after the other."""
        packed = Inputs.cat([self.inputs(0), *inputs])
        step = getattr(self.attention, f"forward_{kind}")
        outputs = [step(layer, batch, *packed.of_layer(layer.layer_id, self.device)) for layer in self.parameters]
        return torch.cat(outputs).cpu()

    def tensor(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def poison(self, slot: int) -> None:
        """What the last tenant may leave: NaN everywhere, and a ring that isn't empty."""
        parts = [self.pool.conv, self.pool.recurrent]
        if self.pool.ring is not None:
            parts += [self.pool.ring.d, self.pool.ring.k, self.pool.ring.g]
            self.pool.ring.cursors[slot] = self.pool.ring.length - 1
        for part in parts:
            part[:, slot] = torch.nan

    def assert_close(self, got: Tensor, right: Tensor, what: str) -> None:
        """Within `TOLERANCE`."""
        assert got.shape == right.shape, f"{what}: shape {list(got.shape)}, expected {list(right.shape)}"
        if not right.numel():
            return
        allowed = TOLERANCE[self.config.activation_dtype]
        error = float((got.double() - right).abs().max() / right.abs().max().clamp(min=1e-3))
        assert error <= allowed, f"{what}: error {error:.1e}, allowed {allowed:.0e}"

    def assert_holds(self, slot: int, truth: Truth) -> None:
        """The slot's states and windows are those of the simulation."""
        self.assert_close(live_states(self.pool)[:, slot], truth.state, f"state of slot {slot}")
        self.assert_close(self.pool.conv[:, slot].cpu(), truth.window, f"window of slot {slot}")


def live_states(pool: StatePool) -> Tensor:
    """States `[layers, slots, HV, V, K]` in fp64 on the CPU, with the updates that a replay ring still holds."""
    states = pool.recurrent.cpu().double()
    if pool.ring is None:
        return states
    d, k, g = (part.cpu().double() for part in (pool.ring.d, pool.ring.k, pool.ring.g))
    k = k.repeat_interleave(d.shape[2] // k.shape[2], dim=2)
    for slot, entries in enumerate(pool.ring.cursors.tolist()):
        for entry in range(entries):
            update = d[:, slot, :, entry].unsqueeze(-1) * k[:, slot, :, entry].unsqueeze(-2)
            states[:, slot] = states[:, slot] * g[:, slot, :, entry, None, None].exp() + update
    return states
