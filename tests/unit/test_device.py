"""Which machine this is: probes of fake torches, names of machines that aren't here."""

from __future__ import annotations

import types

import pytest

from gdn.cpu_facts import read_cpu
from gdn.device import DeviceInfo
from gdn.device import detect_device
from gdn.errors import UnknownDeviceError
from gdn.probes import best_device
from gdn.probes import named_device


def fake_torch(gpus, *, hip=None, current=0, npus=(), fail=None):
    """A torch that sees these GPUs, given as (name, capability or gfx)."""

    def properties(index):
        if fail:
            raise fail
        name, arch = gpus[index]
        return types.SimpleNamespace(
            name=name, multi_processor_count=132, total_memory=80 << 30, shared_memory_per_block_optin=232448,
            gcnArchName=f"{arch}:sramecc+",
        )  # fmt: skip

    cuda = types.SimpleNamespace(
        is_available=lambda: bool(gpus), device_count=lambda: len(gpus), current_device=lambda: current,
        get_device_properties=properties, get_device_capability=lambda index: gpus[index][1],
    )  # fmt: skip
    npu = types.SimpleNamespace(
        is_available=lambda: bool(npus), device_count=lambda: len(npus), current_device=lambda: 0,
        get_device_name=lambda index: npus[index],
    )  # fmt: skip
    version = types.SimpleNamespace(cuda="13.0", hip=hip, cann="8.1.RC1")
    return types.SimpleNamespace(cuda=cuda, npu=npu, version=version)


def loader(torch):
    def load(name):
        if isinstance(torch, BaseException):
            raise torch
        if name == "torch_npu" and not hasattr(torch, "npu_works"):
            raise ImportError("libascendcl.so: cannot open shared object file")
        return torch

    return load


def test_an_nvidia_gpu():
    device = best_device(loader(fake_torch([("NVIDIA H200", (9, 0))])))
    assert (device.type, device.sm, device.runtime, device.index) == ("cuda", 90, "13.0", 0)
    assert (device.name, device.multiprocessors, device.memory_bytes) == ("NVIDIA H200", 132, 80 << 30)
    assert device.architecture == "SM90"
    assert not device.hypothetical


def test_each_gpu_of_a_mixed_host_has_its_own_facts():
    load = loader(fake_torch([("A100", (8, 0)), ("B200", (10, 0))], current=1))
    assert named_device("cuda", 0, load).sm == 80
    assert named_device("cuda", 1, load).sm == 100
    assert best_device(load).sm == 100
    with pytest.raises(UnknownDeviceError, match="torch sees 2 GPUs, asked for number 2"):
        named_device("cuda", 2, load)


def test_an_amd_gpu():
    device = best_device(loader(fake_torch([("MI300X", "gfx942")], hip="6.2.41133-dd7f95766")))
    assert (device.type, device.gfx, device.runtime, device.sm) == ("rocm", "gfx942", "6.2.41133", None)
    assert device.torch_device == "cuda:0"


def test_an_npu():
    torch = fake_torch([], npus=("Ascend910B3",))
    torch.npu_works = True
    device = best_device(loader(torch))
    assert (device.type, device.soc, device.index) == ("npu", "ascend910b3", 0)


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "torch is not installed"),
        (ModuleNotFoundError("No module named 'numpy'", name="numpy"), "torch is broken"),
        (OSError("libcudart.so.12: cannot open"), "torch is broken: OSError: libcudart"),
        (fake_torch([("X", (9, 0))], fail=RuntimeError("no driver")), "GPU probe failed: RuntimeError: no driver"),
    ],
)
def test_what_fails_becomes_text_and_the_cpu_answers(torch, words):
    device = best_device(loader(torch))
    assert device.type == "cpu"
    assert any(words in problem for problem in device.problems)
    with pytest.raises(UnknownDeviceError, match="cuda:0 is not on this host"):
        named_device("cuda", 0, loader(torch))


@pytest.mark.parametrize(
    ("name", "kind", "attribute", "value"),
    [(f"sm{n}", "cuda", "sm", n) for n in (70, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121)]
    + [("SM_90a", "cuda", "sm", 90), ("sm100f", "cuda", "sm", 100), ("gfx942", "rocm", "gfx", "gfx942")]
    + [("gfx1151", "rocm", "gfx", "gfx1151"), ("Ascend910B", "npu", "soc", "ascend910b")],
)
def test_machines_that_are_not_here(name, kind, attribute, value):
    device = DeviceInfo.parse(name, cuda="13.0")
    assert device.type == kind
    assert getattr(device, attribute) == value
    assert device.runtime == "13.0"
    assert device.hypothetical
    assert detect_device(name).hypothetical


def test_the_cpu_of_this_host():
    device = DeviceInfo.parse("cpu")
    assert device.type == "cpu"
    assert device.cpu.cores >= 1
    assert not device.hypothetical


@pytest.mark.parametrize(("name", "near"), [("sm9000", "sm90"), ("cuda0", "cuda:0"), ("tpu", None)])
def test_names_of_nothing(name, near):
    with pytest.raises(UnknownDeviceError, match=f"did you mean '{near}'" if near else "unknown device"):
        DeviceInfo.parse(name)


def test_cpu_features():
    x86 = "vendor_id : GenuineIntel\nmodel name : Xeon\nflags : avx2 fma avx512f avx512bw avx512vl avx512dq amx_tile\n"
    assert read_cpu(x86, "x86_64").features == {"avx2", "avx512"}
    assert read_cpu(x86.replace("amx_tile", "amx_tile amx_bf16 avx512_bf16"), "x86_64").features == {
        "avx2", "avx512", "avx512_bf16", "amx_bf16"
    }  # fmt: skip
    assert read_cpu(x86, "x86_64").vendor == "GenuineIntel"
    assert read_cpu("Features : fp asimd sve\n", "aarch64").features == {"neon", "sve"}
    assert read_cpu("", "arm64").features == {"neon"}


def test_devices_are_cache_keys():
    assert hash(DeviceInfo.parse("sm90")) == hash(DeviceInfo.parse("sm90"))
    assert DeviceInfo.parse("sm90") != DeviceInfo.parse("sm100")
