"""Every kernel compiles for every architecture that the manifest claims, within its shared memory. No GPU needed.

One variant of each kernel by default; `-m "cross_compile"` without `not slow` takes every row of the tables too.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles for real: unset TRITON_INTERPRET", allow_module_level=True)

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gdn.backends.triton import MANIFEST
from gdn.backends.triton import tuning
from gdn.backends.triton._conv_extend_kernel import conv_extend_kernel
from gdn.backends.triton._conv_update_kernel import conv_draft_kernel
from gdn.backends.triton._conv_update_kernel import conv_step_kernel
from gdn.backends.triton._decode_kernel import decode_kernel
from gdn.backends.triton._extend_prepare_kernel import prepare_kernel
from gdn.backends.triton._extend_state_kernel import state_kernel
from gdn.backends.triton._gating_kernel import gating_kernel
from gdn.backends.triton._replay_kernel import replay_kernel
from gdn.backends.triton._split_kernel import split_kernel
from gdn.backends.triton._verify_kernel import verify_kernel
from gdn.backends.triton._verify_walk_kernel import unbuffered_tree_walk_kernel
from gdn.backends.triton._verify_walk_kernel import verify_walk_kernel
from gdn.backends.triton.dots import chunk_precision
from gdn.backends.triton.dots import fp32_precision
from gdn.backends.triton.dots import raw_product
from gdn.backends.triton.extend_tuning import PREPARE_WARPS
from gdn.backends.triton.extend_tuning import extend_tile
from gdn.serving._move_kernel import BLOCK
from gdn.serving._move_kernel import move_kernel

pytestmark = pytest.mark.cross_compile

SHARED_MEMORY = {
    "sm80": 163 << 10, "sm89": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "sm120": 99 << 10,
    "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip
"""Bytes that one block may use."""
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}


def target_of(architecture):
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm")), 32)


def compiled(kernel, architecture, pointers, constants, *, floats=("scale",), missing=(), **options):
    """Compile with aligned pointers, unit inner strides as given in `constants`; returns bytes of shared memory."""
    names = kernel.arg_names
    constants = {**constants, **dict.fromkeys(missing)}
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = f"*{pointers[name]}"
        else:
            signature[name] = "fp32" if name in floats else "i32"
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    shared = triton.compile(source, target=target_of(architecture), options=options).metadata.shared
    assert shared <= SHARED_MEMORY[architecture], f"{shared} bytes of shared memory on {architecture}"


HEADS = {"HV": 32, "RATIO": 2, "K": 128, "V": 128, "BK": 128}
TOKENS = dict.fromkeys(("q", "k", "v", "a", "b", "out", "mixed_qkv"), "bf16")
COMMON = {**TOKENS, "A_log": "fp32", "dt_bias": "fp32", "indices": "i32", "offsets": "i32"}


def tables():
    """Every distinct tile of the recurrent tables, by kernel and state dtype; the tile of large fp32 batches is quick."""
    together = {"states": tuning._STATES, "outputs": tuning._OUTPUTS}
    for kernel, table in {"decode": tuning._DECODE, "replay": tuning._REPLAY, **together}.items():
        for size, rows in table.items():
            for tile in dict.fromkeys(tile for _, tile in rows):
                marks = [] if (size, tile) == (4, rows[-1][1]) else [pytest.mark.slow]
                name = f"{kernel}-{size}-{tile.rows}x{tile.tiles}"
                yield pytest.param(kernel, {2: torch.bfloat16, 4: torch.float32}[size], tile, id=name, marks=marks)


def device_of(architecture):
    return SimpleNamespace(type="rocm" if architecture.startswith("gfx") else "cuda")


def products(architecture, state):
    """Constants of the kernels that take products on tensor cores."""
    operand, precision = raw_product(torch.bfloat16, state, device_of(architecture))
    return {"OPERAND": operand, "PRECISION": precision, "EXACT": fp32_precision(device_of(architecture))}


ROWS = {"q_dim": 1, "k_dim": 1, "v_dim": 1}
DRAFTS = {"buffer_rows": "i32", "parents": "i64"}


@pytest.mark.parametrize("architecture", SHARED_MEMORY)
@pytest.mark.parametrize(("kernel", "state", "tile"), list(tables()))
def test_recurrent_kernels(architecture, kernel, state, tile):
    name = NAMES[state]
    pointers = {**COMMON, "states": name}
    constants = {**HEADS, "BV": tile.rows, "TILES": tile.tiles}
    if kernel == "decode":
        constants |= {"HAS_OFFSETS": False, **ROWS}
        compiled(decode_kernel, architecture, pointers, constants, missing=["offsets"], num_warps=tile.warps)
    elif kernel == "replay":
        rings = {"ring_d": name, "ring_k": name, "ring_g": "fp32", "cursors": "i32", "forced": "i32"}
        constants |= {"L": 16, "BL": 16, "FORCED": True, "column_stride": 1}
        compiled(replay_kernel, architecture, {**pointers, **rings}, constants, num_warps=tile.warps)
    else:
        stores = kernel == "states"
        pointers |= {"buffer": name, **DRAFTS}
        constants |= {"DRAFTS": 8, "BT": 16, "HAS_BUFFER": stores, "TREE": stores, **ROWS}
        constants |= products(architecture, state)
        absent = [] if stores else ["buffer", "buffer_rows", "parents"]
        compiled(verify_kernel, architecture, pointers, constants, missing=absent, num_warps=tile.warps)


@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_walks(architecture):
    pointers = {**COMMON, "states": "fp32", "buffer": "fp32", **DRAFTS}
    constants = {**HEADS, "BV": 16, **ROWS}
    walk = {**constants, "TILES": 1, "DRAFTS": 8, "HAS_BUFFER": True}
    compiled(verify_walk_kernel, architecture, pointers, {**walk, "TREE": False}, missing=["parents"], num_warps=1)
    compiled(verify_walk_kernel, architecture, pointers, {**walk, "TREE": True}, num_warps=1)
    compiled(unbuffered_tree_walk_kernel, architecture, pointers, constants, num_warps=1)


@pytest.mark.parametrize("architecture", SHARED_MEMORY)
@pytest.mark.parametrize(
    ("dtype", "states"),
    [
        (torch.bfloat16, 256),
        pytest.param(torch.bfloat16, 32, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 2048, marks=pytest.mark.slow),
        pytest.param(torch.float32, 256, marks=pytest.mark.slow),
    ],
)
def test_extend(architecture, dtype, states):
    name, narrow = NAMES[dtype], dtype == torch.bfloat16
    precision = chunk_precision(dtype, device_of(architecture))
    pointers = dict.fromkeys(("q", "k", "v", "solve", "attend", "out"), name)
    pointers |= dict.fromkeys(("g", "beta", "factors", "states", "chunk_states"), "fp32")
    pointers |= dict.fromkeys(("indices", "offsets", "snapshot_chunks", "snapshot_slots"), "i32")
    pointers["chunk_offsets"] = "i64"
    heads = {"HK": 16, "RATIO": 2, "K": 128, "BK": 128, "PRECISION": precision}
    strides = {"q_dim": 1, "k_dim": 1, "g_head": 1, "beta_head": 1}
    tile = extend_tile(states, 128, 128, narrow=narrow, shared_memory=SHARED_MEMORY[architecture])
    compiled(
        prepare_kernel, architecture, pointers, {**heads, **strides},
        num_warps=PREPARE_WARPS,
    )  # fmt: skip
    constants = {
        **heads, "V": 128, "BV": tile.rows, "SNAPSHOTS": True, "CHUNK_STATES": True, "STAGES": tile.stages,
        "OPERAND": tl.bfloat16 if narrow else tl.float32, "MOST_CHUNKS": 0, "q_dim": 1, "k_dim": 1, "v_dim": 1,
    }  # fmt: skip
    compiled(state_kernel, architecture, pointers, constants, num_warps=tile.warps, num_stages=tile.stages)


@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_convolution_gating_and_split(architecture):
    floats = dict.fromkeys(
        ("x", "weight", "bias", "out", "state", "windows", "a", "b", "mixed_qkv", "q", "k", "v"), "bf16"
    )
    integers = dict.fromkeys(("query_start_loc", "cache_indices", "slots", "window_rows"), "i32")
    links = dict.fromkeys(("next_token", "next_sibling", "parent_token"), "i64")
    pointers = {**floats, **integers, **links, "has_initial_state": "i1"}
    pointers |= dict.fromkeys(("A_log", "dt_bias", "g", "beta"), "fp32")
    conv = {"WIDTH": 4, "SILU": True, "BLOCK_DIM": 128}
    tiles = (
        (conv_extend_kernel, {**conv, "BLOCK_TOKENS": 32, "x_dim_stride": 1, "out_dim_stride": 1}),
        (conv_step_kernel, {**conv, "BLOCK_ROWS": 2, "x_dim_stride": 1, "out_dim_stride": 1}),
        (conv_draft_kernel, {**conv, "DRAFTS": 4, "BLOCK_DRAFTS": 4}),
        (gating_kernel, {"HEADS": 32, "BLOCK_TOKENS": 32, "BLOCK_HEADS": 32}),
        (split_kernel, {"KEY_WIDTH": 2048, "VALUE_WIDTH": 4096, "BLOCK_TOKENS": 8, "BLOCK_COLUMNS": 512}),
    )
    for kernel, constants in tiles:
        compiled(kernel, architecture, pointers, constants, floats=())


@pytest.mark.parametrize("architecture", SHARED_MEMORY)
@pytest.mark.parametrize("missing", [(), ("source", "origin")])
def test_moves_of_the_serving_layer(architecture, missing):
    pointers = {"target": "bf16", "source": "bf16", "to": "i64", "origin": "i64"}
    pointers = {name: kind for name, kind in pointers.items() if name not in missing}
    compiled(move_kernel, architecture, pointers, {"BLOCK": BLOCK}, floats=(), missing=missing)


def test_every_claimed_architecture_is_compiled_here():
    claims = {e.removeprefix("compiled:") for row in MANIFEST.capabilities for e in row.evidence if "compiled" in e}
    assert claims | {"sm90"} == set(SHARED_MEMORY)
