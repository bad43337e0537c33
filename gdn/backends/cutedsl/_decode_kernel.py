"""Kernel of decode and packed decode: one token per request, some rows of one head's state per block.

A row of the state lies over the lanes of a group, 16 bytes a lane: LANES lanes hold a row, so a warp holds
WARP // LANES rows at a time and takes ROUNDS of them, all loaded before anything is computed. Both products with the
state are taken before it changes: o = alpha S q + (k . q) d.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass import Int32
from cutlass import Int64
from cutlass import const_expr
from cutlass import range_constexpr

from gdn.backends.cutedsl._device_math import VECTOR_BYTES
from gdn.backends.cutedsl._device_math import WARP
from gdn.backends.cutedsl._device_math import aligned_to
from gdn.backends.cutedsl._device_math import decay_of
from gdn.backends.cutedsl._device_math import inverse_norm
from gdn.backends.cutedsl._device_math import strength_of
from gdn.backends.cutedsl._device_math import vector_at
from gdn.backends.cutedsl._device_math import with_alignment


@dataclass(frozen=True)
class DecodeKernel:
    """Constants of one variant."""

    HK: int
    HV: int
    K: int
    V: int
    state_bytes: int
    warps: int
    rounds: int
    """Rows that each group of lanes takes."""
    packed: bool
    """q, k and v are the columns of one matrix, given as `q`."""
    has_offsets: bool
    """The token of a request is found by query_start_loc; `out` is zeroed beforehand."""
    unit: bool
    """Keys and queries lie densely, so aligned ones are loaded as vectors."""

    @property
    def vector(self) -> int:
        """Elements of one access."""
        return VECTOR_BYTES // self.state_bytes

    @property
    def lanes(self) -> int:
        """Lanes of one row."""
        return min(WARP, self.K // self.vector)

    @property
    def pieces(self) -> int:
        """Accesses of one lane to one row."""
        return self.K // (self.vector * self.lanes)

    @property
    def rows_at_once(self) -> int:
        """Rows that a warp holds at a time."""
        return WARP // self.lanes

    @property
    def warp_rows(self) -> int:
        return self.rows_at_once * self.rounds

    @property
    def parts(self) -> int:
        """Blocks of one head."""
        return -(-self.V // (self.warp_rows * self.warps))

    @property
    def whole(self) -> bool:
        """No block has rows beyond V."""
        return self.V % (self.warp_rows * self.warps) == 0

    def blocks(self, indices):
        """Of one launch."""
        return indices.shape[0] * (self.HV * self.parts)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, a: cute.Tensor, b: cute.Tensor, A_log: cute.Tensor,
        dt_bias: cute.Tensor, states: cute.Tensor, indices: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor,
        scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(q, k, v, a, b, A_log, dt_bias, states, indices, offsets, out, scale).launch(
            grid=(self.blocks(indices), 1, 1), block=(self.warps * WARP, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, a: cute.Tensor, b: cute.Tensor, A_log: cute.Tensor,
        dt_bias: cute.Tensor, states: cute.Tensor, indices: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor,
        scale: Float32,
    ):  # fmt: skip
        """Block (request, head, part of the rows), the parts fastest."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        part = block % self.parts
        head = (block // self.parts) % self.HV
        request = block // (self.parts * self.HV)
        first_row = (part * self.warps + thread // WARP) * self.warp_rows
        if const_expr(self.has_offsets):
            token = Int64(offsets[request])
            if token >= 0 and token < out.shape[1] and Int64(offsets[request + 1]) > token:
                self._token(
                    q, k, v, a, b, A_log, dt_bias, states, Int64(indices[request]), out, scale, token, head, first_row,
                    thread % WARP,
                )  # fmt: skip
        else:
            self._token(
                q, k, v, a, b, A_log, dt_bias, states, Int64(indices[request]), out, scale, Int64(request), head,
                first_row, thread % WARP,
            )  # fmt: skip

    @cute.jit
    def _token(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, a: cute.Tensor, b: cute.Tensor, A_log: cute.Tensor,
        dt_bias: cute.Tensor, states: cute.Tensor, slot: Int64, out: cute.Tensor, scale: Float32, token: Int64,
        head: Int32, first_row: Int32, lane: Int32,
    ):  # fmt: skip
        """One warp's rows: from `first_row`, round by round."""
        group, place_in_group = lane // self.lanes, lane % self.lanes
        # Values and outputs of a warp's rows are held by one lane each: this one's row, if it has one.
        own_row = first_row + place_in_group * self.rows_at_once + group
        owns = place_in_group < self.rounds and own_row < self.V
        target = out.iterator + ((token * self.HV + head) * self.V + own_row)
        if slot >= 0 and slot < states.shape[0]:
            state = states.iterator + cute.assume(slot * states.stride[0] + head * (self.V * self.K), divby=self.vector)
            stored = cute.make_rmem_tensor(
                cute.make_layout((self.vector, self.pieces, self.rounds)), states.element_type
            )
            if const_expr(not self.whole):
                stored.fill(0.0)
            for turn in range_constexpr(self.rounds):
                row = first_row + turn * self.rows_at_once + group
                if const_expr(self.whole):
                    self._load_row(stored, state, turn, row, place_in_group)
                elif row < self.V:
                    self._load_row(stored, state, turn, row, place_in_group)

            key_head = head // (self.HV // self.HK)
            if const_expr(self.packed):
                q_base = q.iterator + (token * q.stride[0] + (key_head * self.K) * q.stride[1])
                k_base = q_base + (self.HK * self.K) * q.stride[1]
                v_first = 2 * self.HK * self.K + head * self.V
                v_base, v_dim = q.iterator + (token * q.stride[0] + v_first * q.stride[1]), q.stride[1]
                q_dim, k_dim = q.stride[1], q.stride[1]
            else:
                q_base = q.iterator + (token * q.stride[1] + key_head * q.stride[2])
                k_base = k.iterator + (token * k.stride[1] + key_head * k.stride[2])
                v_base, v_dim = v.iterator + (token * v.stride[1] + head * v.stride[2]), v.stride[3]
                q_dim, k_dim = q.stride[3], k.stride[3]
            # All loads are under way before any is waited for.
            layout = cute.make_layout((self.vector, self.pieces))
            raw_query, raw_key = (cute.make_rmem_tensor(layout, q.element_type) for _ in (0, 1))
            self._read_columns(raw_query, raw_key, q_base, q_dim, k_base, k_dim, place_in_group)
            own_value = (v_base + cutlass.min(own_row, self.V - 1) * v_dim).load()
            gate, strength = a[token, head], b[token, head]
            rate, bias = A_log[head], dt_bias[head]

            query, key = (cute.make_rmem_tensor(layout, Float32) for _ in (0, 1))
            query.store(raw_query.load().to(Float32))
            key.store(raw_key.load().to(Float32))
            own_value = own_value.to(Float32)
            alpha, beta = decay_of(gate, rate, bias), strength_of(strength)
            k_square, q_square, product = Float32(0.0), Float32(0.0), Float32(0.0)
            for i in range_constexpr(self.vector * self.pieces):
                k_square += key[i] * key[i]
                q_square += query[i] * query[i]
                product += key[i] * query[i]
            k_factor = inverse_norm(self._sum(k_square))
            q_factor = inverse_norm(self._sum(q_square)) * scale
            overlap = self._sum(product) * (k_factor * q_factor)

            own_output = Float32(0.0)
            for turn in range_constexpr(self.rounds):
                read, met = Float32(0.0), Float32(0.0)
                for piece in range_constexpr(self.pieces):
                    held = stored[None, piece, turn].load().to(Float32)
                    for i in range_constexpr(self.vector):
                        met += held[i] * key[i, piece]
                        read += held[i] * query[i, piece]
                met, read = self._sum(met) * k_factor, self._sum(read) * q_factor
                value = cute.arch.shuffle_sync(own_value, group * self.lanes + turn)
                d = beta * (value - alpha * met)
                push = d * k_factor
                if place_in_group == turn:
                    own_output = alpha * read + overlap * d
                row = first_row + turn * self.rows_at_once + group
                if const_expr(self.whole):
                    self._store_row(stored, state, turn, row, place_in_group, key, alpha, push)
                elif row < self.V:
                    self._store_row(stored, state, turn, row, place_in_group, key, alpha, push)
            if owns:
                target.store(own_output.to(out.element_type))
        elif owns:
            target.store(Float32(0.0).to(out.element_type))

    def _load_row(self, stored, state, turn: int, row, place_in_group):
        for piece in range(self.pieces):
            column = (piece * self.lanes + place_in_group) * self.vector
            stored[None, piece, turn].store(vector_at(state, row * self.K + column, self.vector).load())

    def _store_row(self, stored, state, turn: int, row, place_in_group, key, alpha, push):
        """Write alpha S + push k^T."""
        updated = cute.make_rmem_tensor(self.vector, Float32)
        for piece in range(self.pieces):
            held = stored[None, piece, turn].load().to(Float32)
            for i in range(self.vector):
                updated[i] = alpha * held[i] + push * key[i, piece]
            column = (piece * self.lanes + place_in_group) * self.vector
            place = vector_at(state, row * self.K + column, self.vector)
            place.store(updated.load().to(stored.element_type))

    def _sum(self, value):
        """Over the lanes of a row."""
        return cute.arch.warp_reduction_sum(value, threads_in_group=self.lanes)

    @cute.jit
    def _read_columns(
        self, query: cute.Tensor, key: cute.Tensor, q_base: cute.Pointer, q_dim: Int64, k_base: cute.Pointer,
        k_dim: Int64, place_in_group: Int32,
    ):  # fmt: skip
        """This lane's columns of the query and the key."""
        nbytes = self.vector * q_base.dtype.width // 8
        if const_expr(self.unit):
            if aligned_to(q_base, nbytes) and aligned_to(k_base, nbytes):
                for piece in range_constexpr(self.pieces):
                    first = (piece * self.lanes + place_in_group) * self.vector
                    query[None, piece].store(vector_at(with_alignment(q_base, nbytes), first, self.vector).load())
                    key[None, piece].store(vector_at(with_alignment(k_base, nbytes), first, self.vector).load())
            else:
                self._read_each(query, q_base, q_dim, place_in_group)
                self._read_each(key, k_base, k_dim, place_in_group)
        else:
            self._read_each(query, q_base, q_dim, place_in_group)
            self._read_each(key, k_base, k_dim, place_in_group)

    def _read_each(self, columns, base, stride, place_in_group):
        for piece in range(self.pieces):
            for i in range(self.vector):
                column = (piece * self.lanes + place_in_group) * self.vector + i
                columns[i, piece] = (base + column * stride).load()
