"""Run an operation and the fp64 reference on the same call, and measure what differs.

Elements that the reference leaves alone must keep their bits, whatever they hold (NaN, canaries); all others are
compared in groups. Elements that the reference makes exactly zero in the output must be exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import torch

from gdn.testing.calls import WRITTEN
from gdn.testing.calls import Call
from gdn.testing.reference import REFERENCE
from gdn.testing.reference import qkv_split
from gdn.testing.tolerances import Quantity
from gdn.testing.tolerances import smallest_row
from gdn.testing.tolerances import tolerance

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """One compared quantity."""

    quantity: str
    error: float
    tolerance: float
    violation: str = ""
    """What broke exactly: bits changed where nothing may be written, or a wrong shape or dtype."""

    @property
    def passed(self) -> bool:
        return not self.violation and self.error <= self.tolerance

    def __str__(self) -> str:
        return f"{self.quantity}: {self.violation or f'error {self.error:.2e}, allowed {self.tolerance:.1e}'}"


def compare(function: Callable[..., Any], call: Call) -> list[Difference]:
    """Call `function` on a copy of `call` and measure it against the reference."""
    ours, theirs = call.copy(), _upcast(call)
    kept = {
        name: value.detach().cpu().clone()
        for name, value in call.arguments.items()
        if isinstance(value, torch.Tensor) and name not in WRITTEN
    }
    result = function(**ours.arguments)
    expected = _reference(call)(**theirs)
    differences = list(_outputs(call, result, expected))
    for name, before in call.arguments.items():
        after = ours.arguments[name]
        if not isinstance(before, torch.Tensor):
            continue
        if name in WRITTEN:
            if name != "out":
                old, new = _usable(call, name, before), _usable(call, name, after)
                differences.append(_written(call, name, old, new, theirs[name]))
            if (between := _changed_between(before, after)) is not None:
                differences.append(Difference(name, 0.0, 0.0, f"memory outside the tensor was written, at {between}"))
        elif not _same_bits(before.detach().cpu(), kept[name]):
            differences.append(Difference(name, 0.0, 0.0, "an input was written"))
    if "out" in call.arguments:
        given = result[0] if call.operation == "extend" else result
        if given.data_ptr() != ours.arguments["out"].data_ptr():
            differences.append(Difference("out", 0.0, 0.0, "the result is not the caller's out"))
    return differences


def assert_matches(function: Callable[..., Any], call: Call) -> None:
    """Raise an AssertionError that lists every quantity that is off."""
    wrong = [str(difference) for difference in compare(function, call) if not difference.passed]
    assert not wrong, f"{call.operation} on {call.case}:\n  " + "\n  ".join(wrong)


def relative_error(got: Tensor, expected: Tensor, floor: float = 0.1) -> float:
    """Worst relative L2 error over rows `[G, n]`; rows below `floor` times the mean norm count by that."""
    got, expected = got.double(), expected.double()
    if got.numel() == 0:
        return 0.0
    norms = expected.norm(dim=1)
    least = floor * norms[norms > 0].mean() if bool((norms > 0).any()) else norms.new_tensor(1e-30)
    errors = (got - expected).norm(dim=1) / torch.maximum(norms, least)
    return float(torch.nan_to_num(errors, nan=torch.inf).max())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(
        *(x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for x in (one, other))
    )


def _changed_between(before: Tensor, after: Tensor) -> int | None:
    """Element of the storage, outside the tensor's own, whose bits changed: the gaps between slots, say."""
    size = before.untyped_storage().nbytes() // before.element_size()
    if size == before.numel():
        return None
    covered = torch.zeros(size, dtype=torch.bool)
    covered.as_strided(before.shape, before.stride(), before.storage_offset()).fill_(True)
    old, new = (torch.as_strided(x, (size,), (1,), 0).detach().cpu() for x in (before, after))
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[before.element_size()]
    changed = ((old.view(bits) != new.view(bits)) & ~covered).nonzero()
    return int(changed[0]) if changed.numel() else None


def _reference(call: Call) -> Callable[..., Any]:
    return qkv_split(call.case.config()) if call.operation == "qkv_split" else REFERENCE[call.operation]


def _upcast(call: Call) -> dict[str, Any]:
    """The arguments on the CPU, all floats in fp64, what is written copied."""
    return {name: _upcast_one(_usable(call, name, value)) for name, value in call.arguments.items()}


def _usable(call: Call, name: str, value: Any) -> Any:
    """A pool without its scratch slots, which hold anything."""
    return value[: value.shape[0] - call.case.reserved] if name == "ssm_states" and call.case.reserved else value


def _upcast_one(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value.clone()


def _outputs(call: Call, result: Any, expected: Any) -> Iterator[Difference]:
    dtype = call.arguments[_ACTIVATION_OF.get(call.operation, "v")].dtype
    match call.operation:
        case "extend":
            yield _output(call, "output", result.output, expected.output, dtype)
            if (result.chunk_states is None) != (expected.chunk_states is None):
                yield Difference("chunk_states", 0.0, 0.0, "chunk states were asked for and not given, or the reverse")
            elif expected.chunk_states is not None:
                pool = call.arguments["ssm_states"].dtype
                yield _output(call, "chunk_states", result.chunk_states, expected.chunk_states, pool)
        case "gating":
            for name, got, right in zip(("g", "beta"), result, expected, strict=True):
                yield _output(call, name, got, right, torch.float32)
        case "qkv_split":
            for name, got, right in zip("qkv", result, expected, strict=True):
                yield _output(call, name, got, right, dtype)
                if not got.is_contiguous():
                    yield Difference(name, 0.0, 0.0, f"not contiguous: strides {got.stride()}")
        case _:
            yield _output(call, "output", result, expected, dtype)


_ACTIVATION_OF = {
    "packed_decode": "mixed_qkv", "replay_decode": "mixed_qkv", "conv_extend": "x", "conv_update": "x", "gating": "a",
    "qkv_split": "mixed_qkv",
}  # fmt: skip


def _output(call: Call, name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> Difference:
    quantity: Quantity = "state" if name == "chunk_states" else "output"
    allowed = tolerance(call.operation, quantity, call.case)
    if got.shape != expected.shape or got.dtype != dtype:
        found = f"{list(got.shape)} {got.dtype}, needs {list(expected.shape)} {dtype}"
        return Difference(name, 0.0, allowed, f"shape and dtype {found}")
    got, expected = _rows(call.operation, name, got.detach().cpu()), _rows(call.operation, name, expected)
    silent = (expected == 0).all(dim=1)
    if call.operation not in ("gating", "qkv_split") and not bool((got[silent] == 0).all()):
        return Difference(name, 0.0, allowed, "rows of nobody are not zero")
    infinite = expected.isinf()
    if bool(infinite.any()):
        if not bool((got.double()[infinite] <= torch.finfo(torch.float32).min).all()):
            return Difference(name, 0.0, allowed, "finite where the reference is infinite")
        got, expected = got.masked_fill(infinite, 0.0), expected.masked_fill(infinite, 0.0)
    return Difference(name, relative_error(got, expected, smallest_row(call.operation, call.case.activation)), allowed)


def _rows(operation: str, name: str, x: Tensor) -> Tensor:
    """`[G, n]`: one token a row; for states one head a row."""
    if name == "chunk_states":
        return x.flatten(0, 2).flatten(1) if x.numel() else x.reshape(0, 1)
    if operation == "conv_extend":
        return x.t().contiguous()
    if operation == "conv_update":
        return x if x.dim() == 2 else x.transpose(1, 2).flatten(0, 1)
    if operation == "gating":
        return x[0].reshape(-1, 1)
    return x[0].flatten(1) if x.numel() else x.reshape(0, 1)


def _written(call: Call, name: str, before: Tensor, after: Tensor, expected: Tensor) -> Difference:
    allowed = tolerance(call.operation, "state", call.case)
    before, after = before.detach().cpu(), after.detach().cpu()
    if not before.is_floating_point():
        wrong = not torch.equal(after.long(), expected.long())
        return Difference(name, 0.0, 0.0, f"{after.tolist()}, needs {expected.tolist()}" if wrong else "")
    old = before.double()
    kept = (expected == old) | (expected.isnan() & old.isnan())
    if not bool((after.double()[kept] == old[kept]).logical_or(old[kept].isnan() & after.double()[kept].isnan()).all()):
        changed = (kept & (after.double() != old) & ~(after.isnan() & old.isnan())).nonzero()[0].tolist()
        return Difference(name, 0.0, allowed, f"element {changed} was written and must not be")
    axes = 1 if name in ("replayssm_d", "replayssm_k", "replayssm_g", "conv_states", "conv_state") else after.dim() - 2
    new = expected.masked_fill(kept, 0.0).flatten(0, axes - 1).flatten(1)
    got = after.double().masked_fill(kept, 0.0).flatten(0, axes - 1).flatten(1)
    return Difference(name, relative_error(got, new, smallest_row(call.operation, call.case.activation)), allowed)
