"""Kernel of `qkv_split`: contiguous copies of the three parts of packed rows."""

import triton
import triton.language as tl


@triton.jit
def copy_part(
    rows,
    out,
    tokens,
    num_tokens,
    block,
    row_stride,
    column_stride,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One block of columns of the part `[FIRST, FIRST + WIDTH)` of some rows, to `out [tokens, WIDTH]`."""
    columns = block.to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (tokens < num_tokens)[:, None] & (columns < WIDTH)[None, :]
    value = tl.load(
        rows + tokens[:, None] * row_stride + (FIRST + columns)[None, :] * column_stride, mask=inside, other=0.0
    )
    tl.store(out + tokens[:, None] * WIDTH + columns[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def split_kernel(
    mixed_qkv,
    q,
    k,
    v,
    num_tokens,
    row_stride,
    column_stride,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program: BLOCK_TOKENS rows by BLOCK_COLUMNS columns of one part; blocks of columns vary fastest."""
    KEY_BLOCKS: tl.constexpr = (KEY_WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    VALUE_BLOCKS: tl.constexpr = (VALUE_WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    BLOCKS: tl.constexpr = 2 * KEY_BLOCKS + VALUE_BLOCKS
    program = tl.program_id(0)
    block = program % BLOCKS
    tokens = (program // BLOCKS).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    if block < KEY_BLOCKS:
        copy_part(mixed_qkv, q, tokens, num_tokens, block, row_stride, column_stride, 0, KEY_WIDTH, BLOCK_COLUMNS)
    elif block < 2 * KEY_BLOCKS:
        copy_part(
            mixed_qkv, k, tokens, num_tokens, block - KEY_BLOCKS, row_stride, column_stride,
            KEY_WIDTH, KEY_WIDTH, BLOCK_COLUMNS,
        )  # fmt: skip
    else:
        copy_part(
            mixed_qkv, v, tokens, num_tokens, block - 2 * KEY_BLOCKS, row_stride, column_stride,
            2 * KEY_WIDTH, VALUE_WIDTH, BLOCK_COLUMNS,
        )  # fmt: skip
