"""What every conformance test stands on: one backend on one device, its bound operations, small hand-made calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

import pytest
import torch

from gdn.capabilities import CapabilityRow
from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.device import detect_device
from gdn.testing.case import Case
from gdn.testing.case import Heads
from gdn.testing.operations import bound_operation
from gdn.testing.operations import declared_operations
from gdn.testing.operations import fit
from gdn.testing.operations import rows_serving
from gdn.testing.reference.projection import log_decay
from gdn.testing.tensors import DTYPES
from gdn.types import DType
from gdn.types import Operation
from gdn.types import StateContract

if TYPE_CHECKING:
    from torch import Tensor

_SMALL: tuple[tuple[int, int], ...] = ((32, 48), (64, 32), (32, 32), (64, 64), (128, 128))


@dataclass(frozen=True)
class Geometry:
    """Heads and dtypes of a hand-made call."""

    heads: Heads
    activation: DType
    state: DType

    def config(self, **changes: Any) -> GdnConfig:
        return self.heads.config(self.activation, self.state, **changes)


@dataclass(frozen=True)
class Tokens:
    """Packed tokens before gating: q, k `[T, HK, K]`, v `[T, HV, V]`, a, b `[T, HV]`, A_log, dt_bias `[HV]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def rows(self, begin: int, end: int) -> Tokens:
        """Tokens begin..end-1."""
        part = {name: getattr(self, name)[begin:end] for name in ("q", "k", "v", "a", "b")}
        return replace(self, **part)

    @property
    def count(self) -> int:
        return self.v.shape[0]


class Harness:
    """Subclass with `backend = "name"`. Every attribute may be overridden."""

    backend: ClassVar[str]
    """The backend under test."""
    device: ClassVar[str | None] = None
    """Where; None: the device that `gdn.detect_device` finds."""

    @classmethod
    def device_info(cls) -> DeviceInfo:
        return _detected(cls.device)

    @classmethod
    def torch_device(cls) -> str:
        """Where tensors are made."""
        return cls.device_info().torch_device

    @classmethod
    def declared(cls) -> tuple[Operation, ...]:
        """Operations under test."""
        return declared_operations(cls.backend)

    @classmethod
    def bind(cls, operation: Operation, config: GdnConfig) -> Callable[..., Any] | None:
        """The backend's function, or None where its manifest doesn't serve the config here."""
        return bound_operation(cls.backend, operation, config, cls.device_info())

    @classmethod
    def rows(cls, operation: Operation, config: GdnConfig) -> Iterator[tuple[CapabilityRow, StateContract]]:
        """The backend's rows that take the config here, each with the state contract it asks for."""
        return rows_serving(cls.backend, operation, config, cls.device_info())

    @classmethod
    def fitted(cls, operation: Operation, case: Case, *, dims: bool = True) -> Case | None:
        """See `gdn.testing.operations.fit`."""
        return fit(operation, case, cls.rows, dims=dims)

    def op(self, operation: Operation, config: GdnConfig) -> Callable[..., Any]:
        """The backend's function; a config that the manifest doesn't serve skips the test and says so."""
        function = self.bind(operation, config)
        if function is None:
            pytest.skip(f"{self.backend} declares no {operation} for {config} on {self.device_info()}")
        return function

    def geometry(self, *operations: Operation, HK: int = 1, HV: int = 1, state: DType | None = None) -> Geometry:
        """The smallest geometry in which the backend serves all the operations, fp32 where it can."""
        activations: tuple[DType, ...] = ("float32", "bfloat16", "float16")
        states: tuple[DType, ...] = ("float32", "bfloat16", "float16") if state is None else (state,)
        for activation in activations:
            for pool in states:
                for K, V in _SMALL:
                    geometry = Geometry(Heads(HK, HV, K, V), activation, pool)
                    if all(self.bind(operation, geometry.config()) for operation in operations):
                        return geometry
        pytest.skip(f"{self.backend} serves {', '.join(operations)} in no small geometry on {self.device_info()}")

    def pool(self, geometry: Geometry, slots: int, fill: float = 0.0) -> Tensor:
        heads = geometry.heads
        shape = (slots, heads.HV, heads.V, heads.K)
        return torch.full(shape, fill, dtype=DTYPES[geometry.state], device=self.torch_device())

    def tensor(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.torch_device())

    def random_tokens(self, geometry: Geometry, count: int, seed: int = 0) -> Tokens:
        generator = torch.Generator().manual_seed(seed)
        HK, HV, K, V = geometry.heads

        def normal(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=generator)
            return values.to(DTYPES[geometry.activation]).to(self.torch_device())

        return Tokens(
            normal(count, HK, K), normal(count, HK, K), normal(count, HV, V), normal(count, HV), normal(count, HV),
            normal(HV).float(), normal(HV).float(),
        )  # fmt: skip

    def basis_tokens(self, geometry: Geometry, count: int, *, decay: bool = True, first: int = 0) -> Tokens:
        """k_t = q_t = e_t, v_t = t + 1, beta = 1, g = ln 0.5 (or 0): after token n column t is (t+1) 0.5^(n-t).

        Shows tokens that are missing, repeated or out of order.
        """
        HK, HV, K, V = geometry.heads
        dtype, device = DTYPES[geometry.activation], self.torch_device()
        k = torch.zeros(count, HK, K)
        v = torch.zeros(count, HV, V)
        for token in range(count):
            k[token, :, first + token] = 1.0
            v[token] = first + token + 1.0
        rate = 0.0 if decay else -100.0
        k, v = k.to(dtype).to(device), v.to(dtype).to(device)
        a, b = (
            torch.zeros(count, HV, dtype=dtype, device=device),
            torch.full((count, HV), 40.0, dtype=dtype, device=device),
        )
        parameters = torch.full((HV,), rate, device=device), torch.zeros(HV, device=device)
        return Tokens(k, k, v, a, b, *parameters)

    def run(self, operation: Operation, geometry: Geometry, tokens: Tokens, pool: Tensor, slots: Sequence[int],
            offsets: Sequence[int] | None = None, **options: Any) -> Any:  # fmt: skip
        """Call decode, packed_decode, extend, verify or tree_verify on hand-made tokens.

        A backend that wants scratch slots gets a copy of the pool with them, laid out alike, which is copied back.
        """
        config = geometry.config(strided_state=not pool.is_contiguous())
        if reserved := next((state.reserved_slots for _, state in self.rows(operation, config)), 0):
            wide = _with_scratch(pool, reserved)
            result = self._run(operation, config, tokens, wide, slots, offsets, **options)
            pool.copy_(wide[: pool.shape[0]])
            return result
        return self._run(operation, config, tokens, pool, slots, offsets, **options)

    def _run(self, operation: Operation, config: GdnConfig, tokens: Tokens, pool: Tensor, slots: Sequence[int],
             offsets: Sequence[int] | None, **options: Any) -> Any:  # fmt: skip
        function = self.op(operation, config)
        offsets = list(range(len(slots) + 1)) if offsets is None else list(offsets)
        indices = options.pop("indices", self.tensor(list(slots)))
        gates = {"A_log": tokens.A_log, "dt_bias": tokens.dt_bias}
        common: dict[str, Any] = {"ssm_states": pool, "cache_indices": indices, **options}
        q, k, v = tokens.q[None], tokens.k[None], tokens.v[None]
        match operation:
            case "decode":
                return function(q, k, v, tokens.a, tokens.b, **gates, **common)
            case "packed_decode":
                mixed = torch.cat([part.flatten(1) for part in (tokens.q, tokens.k, tokens.v)], dim=1)
                return function(mixed, tokens.a, tokens.b, **gates, **common)
            case "extend":
                g = log_decay(tokens.A_log.cpu(), tokens.a.cpu(), tokens.dt_bias.cpu()).float().to(q.device)
                beta = torch.sigmoid(tokens.b.double()).float()
                common["query_start_loc"] = self.tensor(offsets)
                return function(q, k, v, g[None], beta[None], **common)
        common["query_start_loc"] = self.tensor(offsets)
        common.setdefault("cache_steps", max((b - a for a, b in itertools.pairwise(offsets)), default=1) or 1)
        common.setdefault("intermediate_states_buffer", None)
        common.setdefault("intermediate_state_indices", None)
        return function(q=q, k=k, v=v, a=tokens.a, b=tokens.b, **gates, **common)

    def state_after(self, operation: Operation, geometry: Geometry, tokens: Tokens, pool: Tensor) -> Tensor:
        """State `[HV, V, K]` of slot 0 after one token; verify leaves it in its buffer, the others in the pool."""
        if operation != "verify":
            self.run(operation, geometry, tokens, pool, [0])
            return pool[0]
        buffer = pool.new_zeros((1, 1, *pool.shape[1:]))
        kept: dict[str, Any] = {"intermediate_states_buffer": buffer, "intermediate_state_indices": self.tensor([0])}
        self.run(operation, geometry, tokens, pool, [0], **kept)
        return buffer[0, 0]


def _with_scratch(pool: Tensor, reserved: int) -> Tensor:
    """A copy of the pool with slots of NaN after it, and its strides."""
    slots = pool.shape[0] + reserved
    wide = pool.new_full((slots * pool.stride(0),), torch.nan).as_strided((slots, *pool.shape[1:]), pool.stride())
    wide[: pool.shape[0]] = pool
    return wide


@functools.cache
def _detected(device: str | None) -> DeviceInfo:
    return detect_device(device)
