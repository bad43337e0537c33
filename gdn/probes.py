"""Ask torch what devices this host has. Every failed probe becomes text; none raises or breaks a later import."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from gdn.cpu_facts import read_cpu
from gdn.device import CpuInfo
from gdn.device import DeviceInfo
from gdn.errors import UnknownDeviceError

Import = Callable[[str], ModuleType]
Problems = list[str]


def best_device(load: Import = importlib.import_module) -> DeviceInfo:
    """The current GPU or NPU if there is one, else the CPU, with the problems met on the way."""
    problems: Problems = []
    for probe in (_gpu, _npu):
        found = probe(None, load, problems)
        if found is not None:
            return replace(found, problems=tuple(problems))
    return replace(_cpu(), problems=tuple(problems))


def named_device(kind: str, index: int | None, load: Import = importlib.import_module) -> DeviceInfo:
    """The device `kind` number `index`.

    Raises:
        UnknownDeviceError: it isn't here.
    """
    if kind == "cpu":
        return _cpu()
    problems: Problems = []
    found = (_gpu if kind == "cuda" else _npu)(index, load, problems)
    if found is None:
        name = kind if index is None else f"{kind}:{index}"
        raise UnknownDeviceError(f"{name} is not on this host: {'; '.join(problems) or f'torch sees no {kind} device'}")
    return replace(found, problems=tuple(problems))


def _cpu() -> DeviceInfo:
    cpu = read_cpu()
    return DeviceInfo(type="cpu", name=cpu.model, cpu=cpu)


def _torch(load: Import, problems: Problems) -> Any:
    try:
        return load("torch")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            problems.append("torch is not installed")
        else:
            problems.append(f"torch is broken: {error}")
    except Exception as error:  # a broken install raises anything: OSError, RuntimeError, AttributeError
        problems.append(f"torch is broken: {type(error).__name__}: {error}")
    return None


def _gpu(index: int | None, load: Import, problems: Problems) -> DeviceInfo | None:
    torch = _torch(load, problems)
    if torch is None:
        return None
    try:
        if not torch.cuda.is_available():
            return None
        count = torch.cuda.device_count()
        if index is None:
            index = torch.cuda.current_device()
        if index >= count:
            problems.append(f"torch sees {count} GPU{'s' if count != 1 else ''}, asked for number {index}")
            return None
        return _gpu_facts(torch, index)
    except Exception as error:  # a driver that fails half-way raises anything
        problems.append(f"GPU probe failed: {type(error).__name__}: {error}")
        return None


def _gpu_facts(torch: Any, index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    common = {
        "index": index,
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "shared_memory_bytes": getattr(properties, "shared_memory_per_block_optin", None),
        "cpu": read_cpu(),
    }
    if getattr(torch.version, "hip", None):
        gfx = properties.gcnArchName.split(":")[0]
        return DeviceInfo(type="rocm", gfx=gfx, runtime=_release(torch.version.hip), **common)
    major, minor = torch.cuda.get_device_capability(index)
    return DeviceInfo(
        type="cuda", sm=major * 10 + minor, runtime=_release(torch.version.cuda), driver=_nvidia_driver(), **common
    )


def _release(version: str | None) -> str | None:
    """The leading numbers of a version: "6.2.41133-dd7f95766" is 6.2.41133."""
    found = re.match(r"\d+(\.\d+)*", version or "")
    return found.group() if found else None


def _nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    if not path.is_file():
        return None
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", path.read_text(errors="replace"))
    return found.group() if found else None


def _npu(index: int | None, load: Import, problems: Problems) -> DeviceInfo | None:
    """Ascend through torch_npu. It is imported only where it is installed: without CANN its import fails."""
    if not _distribution_exists("torch-npu") and load is importlib.import_module:
        return None
    torch = _torch(load, problems)
    if torch is None:
        return None
    try:
        load("torch_npu")
        if not torch.npu.is_available():
            problems.append("torch_npu is installed but sees no NPU")
            return None
        count = torch.npu.device_count()
        if index is None:
            index = torch.npu.current_device()
        if index >= count:
            problems.append(f"torch_npu sees {count} NPUs, asked for number {index}")
            return None
        name = torch.npu.get_device_name(index)
    except Exception as error:  # torch_npu without CANN raises OSError or ImportError from deep inside
        problems.append(f"torch_npu is installed but unusable: {type(error).__name__}: {error}")
        return None
    runtime = _release(getattr(torch.version, "cann", None))
    return DeviceInfo(type="npu", index=index, name=name, soc=name.lower(), runtime=runtime, cpu=CpuInfo())


def _distribution_exists(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
