"""What a bound function accepts beyond the shapes that every backend checks: the dtypes and dims of its row."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import NamedTuple

from gdn._arguments import refuse
from gdn.backends.flashinfer.layout import check_pool_strides

if TYPE_CHECKING:
    from torch import Tensor

    from gdn.binding import BindContext

HEAD_DIM = 128
"""K and V. The library lets other sizes through and computes garbage."""


class Accepted(NamedTuple):
    """Dtypes by name."""

    activations: frozenset[str]
    state: str

    @classmethod
    def of(cls, context: BindContext) -> Accepted:
        return cls(frozenset(context.row.dtypes), context.state.dtype)

    def check(self, v: Tensor, pool: Tensor, *gates: Tensor) -> None:
        """Refuse what the kernels would reinterpret, round or read beyond.

        Args:
            v: stands for q, k and v, which share a dtype.
            pool: ssm_states.
            gates: a and b, where the kernel takes them raw: it rounds other dtypes to its own.

        Raises:
            InputError: with the argument's name.
        """
        if _name(v) not in self.activations:
            refuse("v", f"dtype {' or '.join(sorted(self.activations))}", _name(v))
        if _name(pool) != self.state:
            refuse("ssm_states", f"dtype {self.state}, that of the state contract", _name(pool))
        if tuple(pool.shape[2:]) != (HEAD_DIM, HEAD_DIM):
            refuse("ssm_states", f"K = V = {HEAD_DIM}", f"V={pool.shape[2]}, K={pool.shape[3]}")
        for name, gate in zip("ab", gates, strict=False):
            if gate.dtype != v.dtype:
                refuse(name, f"dtype {_name(v)}, that of v", _name(gate))
        check_pool_strides(pool)


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
