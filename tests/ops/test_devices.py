"""Field case 70: operations run where their tensors are, whatever device is current; tensors of two devices are refused."""

from __future__ import annotations

import pytest
import torch

import gdn
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.compare import assert_matches
from gdn.types import OPERATIONS

CASE = Case("other-device", lengths=(4, 1, 3), drafts=4)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
def test_case_70_the_second_gpu_while_the_first_is_current(operation):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    triple = gdn.resolve(CASE.config(max_draft_tokens=4, state_checkpoints=True), device="cuda:1")
    assert_matches(triple.operations()[operation], build_call(operation, CASE, seed=0, device="cuda:1"))
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op != "qkv_split"])
def test_case_70_tensors_of_two_devices_are_refused(operation):
    triple = gdn.resolve(CASE.config(max_draft_tokens=4, state_checkpoints=True), device="cpu")
    call = build_call(operation, CASE, seed=0)
    first, *others = [name for name, value in call.arguments.items() if isinstance(value, torch.Tensor)]
    for name in others:
        arguments = {**call.copy().arguments, name: call.arguments[name].to("meta")}
        with pytest.raises(gdn.InputError, match=r"expected device (cpu|meta)") as refused:
            triple.operations()[operation](**arguments)
        assert "cpu" in str(refused.value), (first, name)
