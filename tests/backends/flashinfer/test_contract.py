"""The installed FlashInfer still has the functions that the adapters call, with the arguments that they pass.

Signatures are read from its sources, so neither a GPU nor the libraries that it imports are needed: an upgrade that
renames or drops an argument fails here, before any kernel runs.
"""

from __future__ import annotations

import ast
import importlib.util
from importlib import metadata
from pathlib import Path

import pytest

from gdn.backends.flashinfer import library

try:
    DISTRIBUTION = metadata.distribution("flashinfer-python")
except metadata.PackageNotFoundError:
    pytest.skip("flashinfer-python isn't installed: `make contracts` installs it", allow_module_level=True)

SOURCES = {
    "gdn_prefill:chunk_gated_delta_rule": ("gdn_prefill.py", "chunk_gated_delta_rule"),
    "gdn_decode:gated_delta_rule_decode_pretranspose": ("gdn_decode.py", "gated_delta_rule_decode_pretranspose"),
    "gdn_decode:gated_delta_rule_mtp": ("gdn_decode.py", "gated_delta_rule_mtp"),
    "gdn_kernels:gated_delta_rule_mtp_wy_output_only": (
        "gdn_kernels/gdn_decode_bf16_wy_output_only.py",
        "gated_delta_rule_mtp",
    ),
}


def source(name: str) -> str:
    return Path(str(DISTRIBUTION.locate_file(f"flashinfer/{name}"))).read_text()


def arguments(name: str) -> ast.arguments:
    file, function = SOURCES[name]
    for node in ast.parse(source(file)).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return node.args
    raise AssertionError(f"{file} defines no {function}")


@pytest.mark.parametrize("name", library.ARGUMENTS)
def test_every_argument_that_we_pass_is_taken(name):
    taken = arguments(name)
    names = [argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    assert not [argument for argument in library.ARGUMENTS[name] if argument not in names]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("gdn_prefill:chunk_gated_delta_rule", ("q", "k", "v", "g", "beta")),
        ("gdn_decode:gated_delta_rule_decode_pretranspose", ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b")),
        (
            "gdn_decode:gated_delta_rule_mtp",
            ("q", "k", "v", "initial_state", "initial_state_indices", "A_log", "a", "dt_bias", "b"),
        ),
        ("gdn_kernels:gated_delta_rule_mtp_wy_output_only", ("A_log", "a", "dt_bias")),
    ],
)
def test_positional_arguments_keep_their_order(name, first):
    assert tuple(argument.arg for argument in arguments(name).args[: len(first)]) == first


@pytest.mark.parametrize("name", library.ARGUMENTS)
def test_no_argument_that_we_leave_out_became_required(name):
    taken = arguments(name)
    required = [argument.arg for argument in taken.args[: len(taken.args) - len(taken.defaults)]]
    required += [a.arg for a, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None]
    assert set(required) <= set(library.ARGUMENTS[name])


@pytest.mark.parametrize("symbol", [library.BF16_KERNELS, library.FP32_DECODE_KERNEL, library.FP32_VERIFY_KERNEL])
def test_the_kernel_probes_exist(symbol):
    assert f"{symbol} = None" in source("gdn_kernels/__init__.py")


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl isn't installed")
@pytest.mark.filterwarnings("default")
def test_the_package_imports_without_a_gpu():
    kernels = {
        "gdn_decode:gated_delta_rule_decode_pretranspose": library.FP32_DECODE_KERNEL,
        "gdn_decode:gated_delta_rule_mtp": library.FP32_VERIFY_KERNEL,
    }
    for name in library.ARGUMENTS:
        assert callable(library.function(name, kernel=kernels.get(name)))
