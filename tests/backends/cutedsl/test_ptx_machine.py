"""The machine finds what it is there to find. Needs neither the CuTe DSL nor a GPU."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.backends.cutedsl import ptx_arithmetic as arithmetic
from tests.backends.cutedsl.ptx_machine import Machine
from tests.backends.cutedsl.ptx_machine import Region
from tests.backends.cutedsl.ptx_program import parse

EXCHANGE = """
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(.param .align 8 .b8 kernel_param_0[8])
.reqntid 64, 1, 1
{{
    .reg .b32 %r<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.b32 %r3, memory;
    add.s32 %r4, %r3, %r2;
    st.shared.b32 [%r4], %r1;
    {barrier}
    xor.b32 %r5, %r2, 128;
    add.s32 %r6, %r3, %r5;
    ld.shared.b32 %r7, [%r6];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3{offset}], %r7;
    ret;
}}
"""
"""Each thread of two warps gives its number to one of the other warp."""
BARRIER = "bar.sync 0;"


def exchanged(barrier=BARRIER, offset="", reverse=False):
    memory = np.zeros(64 * 4, dtype=np.uint8)
    program = parse(EXCHANGE.format(barrier=barrier, offset=offset))
    Machine(program, 1, [struct.pack("q", 4096)], [Region(4096, memory)], reverse=reverse).run()
    return memory.view(np.uint32).tolist()


@pytest.mark.parametrize("reverse", [False, True])
def test_warps_meet_at_a_barrier(reverse):
    assert exchanged(reverse=reverse) == [thread ^ 32 for thread in range(64)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_missing_barrier_shows(reverse):
    assert exchanged(barrier="", reverse=reverse) != [thread ^ 32 for thread in range(64)]


@pytest.mark.parametrize(("offset", "fault"), [("+4", "outside"), ("+-4", "outside"), ("+2", "misaligned")])
def test_a_bad_access_shows(offset, fault):
    with pytest.raises(RuntimeError, match=fault):
        exchanged(offset=offset)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_numbers_of_16_bits_round_to_nearest_even(kind):
    import torch

    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100
    bits = arithmetic.narrowed(values.numpy(), kind)
    assert torch.equal(torch.from_numpy(arithmetic.widened(bits, kind)), values.to(dtype).float())
