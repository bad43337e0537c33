"""The vocabulary of argument checks: shapes in symbols, dtypes, devices, each with one way to say what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from typing import Any
from typing import Final
from typing import NoReturn

import torch

from gdn.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
INDICES: Final = (torch.int32, torch.int64)


class Arguments:
    """Checks the arguments of one call. Symbols get their sizes where they are first seen."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._device: torch.device | None = None
        self._device_of = ""

    def tensor(
        self,
        name: str,
        value: Any,
        shape: str,
        dtypes: Iterable[torch.dtype],
        *,
        inner: int = 0,
        contiguous: bool = False,
    ) -> None:
        """Check one tensor.

        Args:
            name: the argument's name.
            value: the argument.
            shape: symbols and numbers by axis, such as "1 T HK K"; ">=D" asks for at least D.
            dtypes: what is accepted.
            inner: how many of the last axes must be laid out contiguously.
            contiguous: all of them.
        """
        if not isinstance(value, torch.Tensor):
            refuse(name, "a tensor", type(value).__name__)
        self._check_shape(name, value, shape.split())
        accepted = tuple(dtypes)
        if value.dtype not in accepted:
            refuse(name, f"dtype {_listed(accepted)}", _dtype(value.dtype))
        if self._device is None:
            self._device, self._device_of = value.device, name
        elif value.device != self._device:
            refuse(name, f"device {self._device}, that of {self._device_of}", str(value.device))
        if (contiguous and not value.is_contiguous()) or (inner and not _contiguous_inside(value, inner)):
            axes = " ".join(shape.split()[-inner:])
            expected = "contiguous memory" if contiguous else f"contiguous memory within [{axes}]"
            refuse(name, expected, f"strides {list(value.stride())} for shape {list(value.shape)}")

    def indices(self, name: str, value: Any, shape: str) -> None:
        """An index tensor: int32 or int64, any strides."""
        self.tensor(name, value, shape, INDICES)

    def optional_indices(self, name: str, value: Any, shape: str) -> None:
        """An index tensor or None."""
        if value is not None:
            self.indices(name, value, shape)

    def heads(self) -> None:
        """HV must be a multiple of HK."""
        key_heads, value_heads = self.sizes["HK"], self.sizes["HV"]
        if key_heads < 1 or value_heads < 1 or value_heads % key_heads:
            refuse("v", f"a number of value heads that is a multiple of HK={key_heads}", f"HV={value_heads}")

    def _check_shape(self, name: str, value: Tensor, symbols: list[str]) -> None:
        got = list(value.shape)
        if len(got) != len(symbols):
            refuse(name, f"{len(symbols)} axes {self._spelled(symbols)}", f"{len(got)} axes {got}")
        for size, symbol in zip(got, symbols, strict=True):
            if symbol.startswith(">="):
                fits = size >= self._size(symbol[2:])
            elif symbol.isdigit() or symbol in self.sizes:
                fits = size == self._size(symbol)
            else:
                self.sizes[symbol] = size
                fits = True
            if not fits:
                refuse(name, f"shape {self._spelled(symbols)}", str(got))

    def _size(self, symbol: str) -> int:
        return int(symbol) if symbol.isdigit() else self.sizes[symbol]

    def _spelled(self, symbols: list[str]) -> str:
        known = [s.removeprefix(">=") for s in symbols]
        sizes = ", ".join(dict.fromkeys(f"{s}={self.sizes[s]}" for s in known if s in self.sizes))
        return f"[{', '.join(symbols)}]" + (f" with {sizes}" if sizes else "")


def refuse(name: str, expected: str, got: str) -> NoReturn:
    """Raise the error that every refused argument gets."""
    raise InputError(f"{name}: expected {expected}, got {got}")


def _contiguous_inside(value: Tensor, axes: int) -> bool:
    """Whether the last `axes` axes are laid out as in a contiguous tensor; axes of size 1 have no say."""
    expected = 1
    for size, stride in zip(reversed(value.shape[-axes:]), reversed(value.stride()[-axes:]), strict=True):
        if size == 0 or value.numel() == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(_dtype, dtypes))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
