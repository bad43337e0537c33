"""Conditions of a default: met or said to fail with what was got and what is needed."""

import pytest

from gdn.conditions import Condition
from gdn.conditions import Question
from gdn.conditions import failures
from gdn.device import DeviceInfo
from gdn.types import StateContract
from tests.unit.builders import CONFIG
from tests.unit.builders import H200

QUESTION = Question(CONFIG, H200, StateContract("float32"), ("triton",))
NO_RUNTIME = Question(CONFIG, DeviceInfo(type="cuda", sm=90), StateContract("float32"))


@pytest.mark.parametrize(
    ("condition", "question", "failure"),
    [
        (Condition("config.head_k_dim", 64), QUESTION, None),
        (Condition("config.head_k_dim", 128), QUESTION, "head_k_dim=64, needs 128"),
        (Condition("state.dtype", "bfloat16"), QUESTION, "state.dtype='float32', needs 'bfloat16'"),
        (Condition("named", ()), QUESTION, "named=('triton',), needs ()"),
        (Condition("named", ()), NO_RUNTIME, None),
        (Condition("runtime_major", least=13), QUESTION, None),
        (Condition("runtime_major", least=14), QUESTION, "runtime_major=13, needs >=14"),
        (Condition("runtime_major", least=13), NO_RUNTIME, "runtime_major=None, needs >=13"),
        (Condition("config.max_tokens", most=9), QUESTION, "max_tokens=None, needs <=9"),
        (Condition("config.head_v_dim", most=127), QUESTION, "head_v_dim=128, needs <=127"),
        (Condition("config.head_v_dim", least=1, most=127), QUESTION, "head_v_dim=128, needs 1 to 127"),
        (Condition("config.head_v_dim", least=128, most=128), QUESTION, None),
    ],
)
def test_failure(condition, question, failure):
    assert condition.failure(question) == failure


def test_every_failure_is_told():
    conditions = (Condition("config.head_k_dim", 128), Condition("state.dtype", "float32"), Condition("named", ()))
    assert len(list(failures(conditions, QUESTION))) == 2
