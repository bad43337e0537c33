"""What a compilable triple holds: each function calls the bound one in eager mode, and its operator in a graph.

`is_compiling` is a constant while a graph is traced, so a graph holds the operator alone. In eager mode the extra frame
costs some 0.15 us a call, where an operator costs 8 us and more (measured on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import Final

from gdn.torch_ops.around import AROUND
from gdn.torch_ops.recurrent import RECURRENT

CALLABLES: Final[dict[str, Callable[..., Callable[..., Any]]]] = {**RECURRENT, **AROUND}
"""By operation: the bound function, its plan and its config make the function of a compilable triple."""
