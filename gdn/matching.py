"""Does one manifest row serve this config on this device? Every failing constraint becomes a reason."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gdn.capabilities import CapabilityRow
from gdn.capabilities import CpuTarget
from gdn.capabilities import CudaTarget
from gdn.capabilities import NpuTarget
from gdn.capabilities import RocmTarget
from gdn.config import GdnConfig
from gdn.device import DeviceInfo
from gdn.reasons import Reason
from gdn.types import Operation
from gdn.types import StateContract

InstalledVersion = Callable[[str], str | None]
"""Version of an installed distribution by name, or None."""


def match(
    row: CapabilityRow,
    operation: Operation,
    config: GdnConfig,
    device: DeviceInfo,
    state: StateContract,
    installed: InstalledVersion,
) -> tuple[Reason, ...]:
    """All reasons why `row` can't serve `operation`; empty if it can.

    Pure: the same arguments give the same answer on any machine.
    """
    return (
        *_device_reasons(row, device),
        *_requirement_reasons(row, installed),
        *_geometry_reasons(row, config, state),
        *_feature_reasons(row, operation, config),
    )


def _device_reasons(row: CapabilityRow, device: DeviceInfo) -> Iterator[Reason]:
    target = row.target
    if target.platform != device.type:
        yield Reason("device_type", f"device is {device.type}, needs {target.platform}")
        return
    match target:
        case CudaTarget():
            if device.sm is None or not any(device.sm in span for span in target.sm_range):
                got = "unknown" if device.sm is None else f"SM{device.sm}"
                yield Reason("sm_range", f"device is {got}, needs SM{','.join(map(str, target.sm_range))}")
            if target.runtime and not (device.runtime and SpecifierSet(target.runtime).contains(device.runtime)):
                yield Reason("runtime_version", f"CUDA is {device.runtime or 'unknown'}, needs {target.runtime}")
        case RocmTarget():
            if target.gfx and device.gfx not in target.gfx:
                yield Reason("device_type", f"device is {device.gfx or 'unknown'}, needs {','.join(target.gfx)}")
        case NpuTarget():
            if target.soc and device.soc not in target.soc:
                yield Reason("device_type", f"device is {device.soc or 'unknown'}, needs {','.join(target.soc)}")
        case CpuTarget():
            if missing := [name for name in target.features if name not in device.cpu.features]:
                got = ",".join(sorted(device.cpu.features)) or "none"
                yield Reason("device_type", f"CPU features are {got}, needs {','.join(missing)}")


def _requirement_reasons(row: CapabilityRow, installed: InstalledVersion) -> Iterator[Reason]:
    for text in row.requires:
        requirement = _requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = installed(requirement.name)
        if version is None:
            yield Reason("requires_missing", f"{requirement.name} is not installed, needs {text}")
        elif not _satisfied(text, version):
            yield Reason("requires_version", f"{requirement.name} is {version}, needs {requirement.specifier}")


@lru_cache(maxsize=256)
def _requirement(text: str) -> Requirement:
    return Requirement(text)


@lru_cache(maxsize=256)
def _satisfied(text: str, version: str) -> bool:
    return _requirement(text).specifier.contains(version, prereleases=True)


_STATELESS: Final = frozenset({"gating", "qkv_split", "conv_extend", "conv_update"})


def _geometry_reasons(row: CapabilityRow, config: GdnConfig, state: StateContract) -> Iterator[Reason]:
    if config.head_k_dim not in row.head_dims.k:
        yield Reason("head_dim", f"head_k_dim={config.head_k_dim}, needs {row.head_dims.k}")
    if config.head_v_dim not in row.head_dims.v:
        yield Reason("head_dim", f"head_v_dim={config.head_v_dim}, needs {row.head_dims.v}")
    if config.head_ratio not in row.head_ratios:
        yield Reason("head_ratio", f"num_v_heads/num_k_heads={config.head_ratio}, needs {row.head_ratios}")
    if config.activation_dtype not in row.dtypes:
        needs = ",".join(sorted(row.dtypes))
        yield Reason("activation_dtype", f"activation_dtype={config.activation_dtype}, needs {needs}")
    if row.op.startswith("conv") and config.conv_kernel_size not in row.conv_widths:
        yield Reason("conv_width", f"conv_kernel_size={config.conv_kernel_size}, needs {row.conv_widths}")
    if row.op not in _STATELESS:
        if state.dtype not in row.state_dtypes:
            yield Reason("state_dtype", f"state_dtype={state.dtype}, needs {','.join(sorted(row.state_dtypes))}")
        if state.layout not in row.state_layouts:
            yield Reason("state_dtype", f"state layout={state.layout}, needs {','.join(sorted(row.state_layouts))}")


def _feature_reasons(row: CapabilityRow, operation: Operation, config: GdnConfig) -> Iterator[Reason]:
    if operation == "packed_decode" and not row.packed_decode:
        yield Reason("packed_decode", "the row declares packed_decode=False, needs True")
    if row.op == "decode" and not row.replay and (operation == "replay_decode" or config.replay_window):
        yield Reason("replay", f"replay_window={config.replay_window}, the row declares replay=False")
    if operation == "tree_verify" and not row.tree:
        yield Reason("tree_verify", f"tree_drafts={config.tree_drafts}, the row declares tree=False")
    if row.op == "verify" and row.max_draft_tokens is not None and config.max_draft_tokens > row.max_draft_tokens:
        yield Reason("draft_tokens", f"max_draft_tokens={config.max_draft_tokens}, needs <= {row.max_draft_tokens}")
    if config.strided_state and not row.strided_state and row.op not in ("gating", "qkv_split"):
        yield Reason("strided_state", "strided_state=True, the row declares strided_state=False")
    if config.state_checkpoints and row.op == "extend" and not row.state_checkpoints:
        yield Reason("state_checkpoints", "state_checkpoints=True, the row declares state_checkpoints=False")
    if config.deterministic and not row.deterministic:
        yield Reason("deterministic", "deterministic=True, the row declares deterministic=False")
    if config.cuda_graph and row.op != "extend" and not row.cuda_graph:
        yield Reason("cuda_graph", "cuda_graph=True, the row declares cuda_graph=False")
