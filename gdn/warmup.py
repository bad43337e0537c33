"""Run each bound operation once before the first request, so that compilers run at start-up and say how long."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from gdn.errors import ConfigError
from gdn.types import CHUNK

if TYPE_CHECKING:
    from gdn.testing.case import Case
    from gdn.triple import ResolvedTriple

logger = logging.getLogger("gdn.warmup")
Progress = Callable[[str], None]


def warm_up(
    triple: ResolvedTriple, batches: Sequence[int] = (1,), progress: Progress | None = None
) -> dict[str, float]:
    """Seconds that each operation took at its first calls, compilation included.

    Args:
        triple: its operations run on small tensors of their own, on the triple's device; no pool of the caller is read.
        batches: numbers of requests to run; kernels differ by batch, so name those of the server's graphs.
        progress: called with each line as it is known; by default lines go to the logger `gdn.warmup` at INFO.

    Raises:
        ConfigError: the triple was resolved for a device that isn't this host's, or no batch is positive.
    """
    if triple.device.hypothetical:
        raise ConfigError(f"warm-up runs kernels, and {triple.device} is not a device of this host")
    if not batches or min(batches) < 1:
        raise ConfigError(f"batches={tuple(batches)} must hold positive numbers")
    say = progress or logger.info
    seconds: dict[str, float] = {}
    for name, function in triple.operations().items():
        say(f"warming up {name} of {triple.backends[name]}")
        seconds[name] = _timed(triple, name, function, batches)
        say(f"{name} of {triple.backends[name]} ready in {seconds[name]:.2f} s")
    return seconds


def _timed(triple: ResolvedTriple, name: str, function: Callable[..., Any], batches: Sequence[int]) -> float:
    from gdn.testing.calls import build_call

    device = triple.device.torch_device
    calls = [build_call(name, _case(triple, name, batch), seed=0, device=device) for batch in batches]
    begin = time.perf_counter()
    for call in calls:
        function(**call.arguments)
    _wait(triple)
    return time.perf_counter() - begin


def _case(triple: ResolvedTriple, name: str, batch: int) -> Case:
    """Few tokens, the config's heads and dtypes, the pool that the state contract asks for."""
    from gdn.testing.case import Case
    from gdn.testing.case import Heads

    config = triple.config
    heads = Heads(config.num_k_heads, config.num_v_heads, config.head_k_dim, config.head_v_dim)
    drafts = max(config.max_draft_tokens, 1)
    lengths = {"extend": CHUNK + 1, "verify": drafts, "tree_verify": drafts}
    return Case(
        "warm-up", heads=heads, lengths=(lengths.get(name, 1),) * batch, activation=config.activation_dtype,
        state=triple.state.dtype, drafts=drafts, tree=name == "tree_verify", width=config.conv_kernel_size,
        ring=config.replay_window or 16, reserved=triple.state.reserved_slots,
    )  # fmt: skip


def _wait(triple: ResolvedTriple) -> None:
    if triple.device.type != "cpu":
        torch: Any = importlib.import_module("torch")
        kind = torch.npu if triple.device.type == "npu" else torch.cuda
        kind.synchronize(triple.device.index)
