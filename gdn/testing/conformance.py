"""The tests that every backend must pass. A third party subclasses with one line:

    from gdn.testing.conformance import BackendConformance

    class TestAcme(BackendConformance):
        backend = "acme"

What is tested follows from the backend's manifest: each declared operation, in each declared dtype, in each awkward
situation, on the device found.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import subprocess
import sys
from typing import Any
from typing import ClassVar

import pytest
import torch

from gdn.api import explain
from gdn.capabilities import BackendManifest
from gdn.errors import InputError
from gdn.reasons import REASON_CODES
from gdn.testing.algebra import Algebra
from gdn.testing.calls import WRITTEN
from gdn.testing.calls import build_call
from gdn.testing.case import Case
from gdn.testing.compare import assert_matches
from gdn.testing.field_cases import FieldCases
from gdn.testing.graphs import GraphCapture
from gdn.testing.operations import manifest_of
from gdn.testing.operations import serving_config
from gdn.testing.refusals import broken_calls
from gdn.testing.situations import SITUATIONS
from gdn.testing.strategies import any_config
from gdn.types import OPERATIONS
from gdn.types import DType
from gdn.types import Operation

try:
    from hypothesis import HealthCheck
    from hypothesis import given
    from hypothesis import settings
except ImportError as error:
    raise ImportError("gdn.testing.conformance needs pytest and hypothesis: pip install pytest hypothesis") from error


class BackendConformance(FieldCases, Algebra, GraphCapture):
    """Set `backend`; `device`, `dtypes` and `bind` may be overridden."""

    dtypes: ClassVar[tuple[tuple[DType, DType], ...]] = (
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float16", "float16"),
    )
    """Pairs of activation and state dtypes; those that no row declares are left out."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "situation" in metafunc.fixturenames:
            points = [
                pytest.param(operation, case, id=f"{operation}-{case.name}-{case.activation}-{case.state}")
                for operation in self.declared()
                for case in self.situations(operation)
            ]
            metafunc.parametrize(("operation", "situation"), points)
        elif "operation" in metafunc.fixturenames:
            metafunc.parametrize("operation", self.declared())

    @classmethod
    def situations(cls, operation: Operation) -> list[Case]:
        """The situations of one operation in every dtype pair, where the manifest serves them."""
        return [
            case
            for plain, (activation, state) in itertools.product(SITUATIONS[operation], cls.dtypes)
            if cls.serves(operation, case := plain.but(activation=activation, state=state))
        ]

    @classmethod
    def serves(cls, operation: Operation, case: Case) -> bool:
        checkpoints = case.chunk_states or case.snapshots is not None
        return cls.bind(operation, serving_config(operation, case, state_checkpoints=checkpoints)) is not None

    def test_matches_the_reference(self, operation: Operation, situation: Case) -> None:
        function = self.op(operation, situation.config())
        for seed in range(2):
            assert_matches(function, build_call(operation, situation, seed=seed, device=self.torch_device()))

    def test_every_declared_operation_is_exercised_here(self, operation: Operation) -> None:
        assert self.situations(operation), f"no situation of {operation} is served on {self.device_info()}"

    def test_bad_arguments_are_refused_by_name_and_nothing_is_written(self, operation: Operation) -> None:
        case = self.situations(operation)[0]
        function = self.op(operation, case.config())
        for name, call in broken_calls(build_call(operation, case, seed=0, device=self.torch_device())):
            written = WRITTEN & call.arguments.keys()
            before = {key: _bits(call.arguments[key]) for key in written}
            with pytest.raises(InputError, match=name):
                function(**call.arguments)
            assert {key: _bits(call.arguments[key]) for key in written} == before, name

    def test_case_64_threads_give_the_results_of_one(self, operation: Operation) -> None:
        cases = self.situations(operation)[:6]
        functions = [self.op(operation, case.config()) for case in cases]
        calls = [build_call(operation, case, seed=5, device=self.torch_device()) for case in cases]
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            jobs = [
                threads.submit(assert_matches, *pair) for _ in range(4) for pair in zip(functions, calls, strict=True)
            ]
            for job in jobs:
                job.result(timeout=300)

    def test_deterministic_rows_repeat_their_bits(self, operation: Operation) -> None:
        for case in self.situations(operation):
            function = self.bind(operation, case.config(deterministic=True))
            if function is None:
                continue
            first, second = (build_call(operation, case, seed=3, device=self.torch_device()) for _ in range(2))
            results = [_flat(function(**call.arguments)) for call in (first, second)]
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), case
            for name in WRITTEN & first.arguments.keys():
                assert _bits(first.arguments[name]) == _bits(second.arguments[name]), (case, name)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(config=any_config())
    def test_any_config_is_served_or_refused_with_reasons(self, config: Any) -> None:
        report = explain(config, device=self.device_info())
        for operation in OPERATIONS:
            if report.chosen.get(operation) == self.backend or self.bind(operation, config) is not None:
                continue
            reasons = report.reasons(operation, self.backend)
            needed = operation in report.needed
            assert reasons or not needed, f"{operation} is refused without a reason"
            assert all(reason.code in REASON_CODES for reason in reasons)

    def test_the_manifest_survives_json(self) -> None:
        manifest = manifest_of(self.backend)
        assert BackendManifest.model_validate(json.loads(manifest.model_dump_json())) == manifest

    def test_reading_the_manifest_imports_no_framework(self) -> None:
        code = (
            "import sys; from gdn.registry import get_registry; get_registry().manifests\n"
            "loaded = {'torch', 'triton', 'cutlass', 'flashinfer', 'torch_npu'} & set(sys.modules)\n"
            "assert not loaded, loaded"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def _bits(value: Any) -> bytes | None:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return None
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _flat(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if part is not None]


__all__ = ["BackendConformance"]
