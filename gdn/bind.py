"""Import the chosen backends' factories and let them build their functions. The only place that reaches a kernel."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

from gdn.binding import BindContext
from gdn.capabilities import BackendManifest
from gdn.capabilities import CapabilityRow
from gdn.errors import BackendRefused
from gdn.errors import InputError
from gdn.report import ResolutionReport
from gdn.types import Operation

Bound = dict[Operation, Callable[..., Any]]


class Refusal(NamedTuple):
    """A factory that would not or could not build its operation."""

    backend: str
    operation: Operation
    row: int
    message: str


def bind(report: ResolutionReport, manifests: Mapping[str, BackendManifest], cache: dict[Any, Any]) -> Bound | Refusal:
    """Build every chosen operation of `report`; the first refusal ends the attempt.

    Args:
        report: a complete report.
        manifests: by name.
        cache: functions built in earlier attempts of the same resolve, so that a re-run builds only what is new.
    """
    assert report.state is not None
    bound: Bound = {}
    for operation, backend in report.chosen.items():
        if backend is None:
            continue
        index = report.rows[operation]
        row = manifests[backend].capabilities[index]
        key = (operation, backend, index, report.state)
        if key not in cache:
            context = BindContext(operation, report.config, report.device, report.state, row)
            try:
                cache[key] = _load(_factory_of(row, operation))(context)
            except BackendRefused as refusal:
                return Refusal(backend, operation, index, str(refusal))
            except Exception as error:  # a kernel that fails to load or to build is one more refused candidate
                return Refusal(backend, operation, index, f"{type(error).__name__}: {error}")
        bound[operation] = cache[key]
    if "verify" in bound:
        bound["verify"] = _verify_for_trees(report, bound)
    return bound


def _factory_of(row: CapabilityRow, operation: Operation) -> str:
    factory = {
        "packed_decode": row.packed_factory,
        "replay_decode": row.replay_factory,
        "tree_verify": row.tree_factory,
    }.get(operation, row.factory)
    assert factory is not None
    return factory


def _load(factory: str) -> Callable[[BindContext], Callable[..., Any]]:
    module, _, name = factory.partition(":")
    loaded: Callable[[BindContext], Callable[..., Any]] = getattr(importlib.import_module(module), name)
    return loaded


def _verify_for_trees(report: ResolutionReport, bound: Bound) -> Callable[..., Any]:
    """Verify as the server calls it: trees go to the backend of tree_verify, chains to that of verify."""
    chain, tree = bound["verify"], bound.get("tree_verify")
    if tree is not None and report.chosen["tree_verify"] == report.chosen["verify"]:
        return chain

    def verify(
        A_log: Any,
        dt_bias: Any,
        q: Any,
        k: Any,
        v: Any,
        a: Any,
        b: Any,
        *,
        ssm_states: Any,
        cache_indices: Any,
        query_start_loc: Any,
        intermediate_states_buffer: Any,
        intermediate_state_indices: Any,
        cache_steps: int,
        retrieve_parent_token: Any = None,
        scale: float | None = None,
        out: Any = None,
    ) -> Any:
        function = chain if retrieve_parent_token is None else tree
        if function is None:
            raise InputError("retrieve_parent_token: expected None, no backend of this triple verifies trees")
        return function(
            A_log, dt_bias, q, k, v, a, b,
            ssm_states=ssm_states, cache_indices=cache_indices, query_start_loc=query_start_loc,
            intermediate_states_buffer=intermediate_states_buffer,
            intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
            retrieve_parent_token=retrieve_parent_token, scale=scale, out=out,
        )  # fmt: skip

    return verify
