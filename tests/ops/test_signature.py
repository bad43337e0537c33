"""Plans are found by everything they may depend on, and by nothing else."""

from __future__ import annotations

import threading

import pytest
import torch

from gdn import signature
from gdn.errors import InputError
from gdn.signature import planned


@pytest.fixture(params=["compiled", "plain"])
def plans(request, monkeypatch):
    """Plans that count their builds, with and without torch's compiled check."""
    if request.param == "plain":
        monkeypatch.setattr(signature, "TensorGuards", None)
    built = []

    def build(*args):
        built.append(args)
        return len(built)

    return planned(build)


def test_equal_signatures_share_a_plan(plans):
    assert plans(torch.zeros(2, 3), None, 4) == 1
    assert plans(torch.ones(2, 3), None, 4) == 1
    assert plans(torch.ones(2, 3)[:], None, 4) == 1


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(2, 4), None, 4),
        (torch.zeros(3, 2).t(), None, 4),
        (torch.zeros(2, 3, dtype=torch.float64), None, 4),
        (torch.zeros(2, 3, device="meta"), None, 4),
        (torch.zeros(2, 6)[:, ::2], None, 4),
        (torch.zeros(2, 3), torch.zeros(1), 4),
        (torch.zeros(2, 3), None, 5),
        (torch.zeros(2, 3), None, 4.0),
        (torch.zeros(2, 3), None, True),
        (torch.zeros(2, 3), None, "4"),
        (torch.zeros(2, 3), None, None),
        (None, None, 4),
    ],
)
def test_case_39_any_other_signature_has_its_own_plan(plans, other):
    first = torch.zeros(2, 3), None, 4
    for _ in range(20):
        assert plans(*first) == 1
        assert plans(*other) == 2


def test_one_tensor_in_two_places_is_no_promise(plans):
    x, y = torch.zeros(2, 3), torch.zeros(2, 3)
    for _ in range(3):
        assert plans(x, x, x) == 1
        assert plans(x, y, x) == 1
        assert plans(x, torch.zeros(3, 2), x) == 2
        assert plans(x, x, torch.zeros(6)) == 3


def test_the_compiled_check_takes_the_repeated_call():
    if signature.TensorGuards is None:
        pytest.skip("this torch has no compiled check")
    for args in ((torch.zeros(2), None, 3), (torch.zeros(2), torch.ones(3, 4).t()), 2 * (torch.zeros(5),)):
        plans = planned(lambda *args: "plan")
        plans(*args)
        assert plans._last.matches(args)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_thread_mode_neither_splits_nor_loses_plans(plans, mode):
    x = torch.zeros(2, 3)
    assert plans(x) == 1
    with mode():
        assert plans(x) == 1
        assert plans(x) == 1
    assert plans(x) == 1


def test_errors_are_not_remembered():
    calls = []

    def build(x):
        calls.append(x)
        if len(calls) == 1:
            raise InputError("x: expected better, got worse")
        return "plan"

    plans = planned(build)
    with pytest.raises(InputError):
        plans(torch.zeros(1))
    assert plans(torch.zeros(1)) == "plan"


def test_an_argument_without_a_hash_reaches_the_builder():
    def build(x):
        raise InputError(f"x: expected a tensor, got {type(x).__name__}")

    with pytest.raises(InputError, match="list"):
        planned(build)([1, 2])


def test_plans_are_bounded():
    built = []
    plans = planned(lambda x: built.append(x.shape), capacity=4)
    for size in range(10):
        plans(torch.zeros(size))
    assert len(plans._plans) == 4
    plans(torch.zeros(9))
    assert len(built) == 10
    plans(torch.zeros(0))
    assert len(built) == 11


def test_threads_never_get_each_others_plans():
    plans = planned(lambda x: tuple(x.shape))
    wrong = []

    def work(size):
        x = torch.zeros(size)
        wrong.extend(size for _ in range(3000) if plans(x) != (size,))

    threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
