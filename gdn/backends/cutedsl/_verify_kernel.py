"""Kernel of verify for up to 16 drafts a request: the state is read once, all drafts meet it together.

With S the slot's state, E[i, j] the decay from draft j to draft i along its path (0 where j isn't on it) and e[i] the
one since S, the updates d of all drafts solve the unit triangular system (WY form of the delta rule)

    d_i = beta_i (v_i - e_i S k_i - sum_{j < i} E_ij (k_i . k_j) d_j)
    o_i = e_i S q_i + sum_{j <= i} E_ij (q_i . k_j) d_j

so that outputs need no state but S, and the state after draft i is e_i S + sum_j E_ij d_j k_j^T. Decays are products
of the gates' exponentials: nothing is divided, so a decay to zero is exact. Keys and queries meet the state as they
were given, on tensor cores, where 16-bit numbers lose nothing; their norms are factors of the results.

A block holds some rows of one head's state. What all its rows need (norms, the products of keys and queries, decays) is
found once, while the rows are on their way; then one thread solves one row.
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
from cutlass.memory import SmemAllocator

from gdn.backends.cutedsl._device_math import VECTOR_BYTES
from gdn.backends.cutedsl._device_math import WARP
from gdn.backends.cutedsl._device_math import decay_of
from gdn.backends.cutedsl._device_math import inverse_norm
from gdn.backends.cutedsl._device_math import number_if
from gdn.backends.cutedsl._device_math import strength_of
from gdn.backends.cutedsl._device_math import vector_at
from gdn.backends.cutedsl._mma import add_product
from gdn.backends.cutedsl._mma import add_wide_product
from gdn.backends.cutedsl._mma import words_of

TILE = 16
"""Rows of one product."""
_NARROW = 8
"""Columns of one product, and 16-bit numbers of one access."""


@dataclass(frozen=True)
class VerifyKernel:
    """Constants of one variant."""

    HK: int
    HV: int
    K: int
    V: int
    steps: int
    """Drafts of a request that count: cache_steps, at most 16."""
    state_bytes: int
    same: bool
    """States and activations have one dtype, of 16 bits."""
    warps: int
    tiles: int
    """Of 16 rows, one warp: 1 or 2."""
    stores: bool
    """There is a buffer for the states after each draft."""
    tree: bool

    @property
    def drafts(self) -> int:
        """Padded so that keys and queries fill whole products."""
        return next(size for size in (4, 8, 16) if size >= self.steps)

    @property
    def vector(self) -> int:
        """Elements of one access to the state."""
        return VECTOR_BYTES // self.state_bytes

    @property
    def chunks(self) -> int:
        """Accesses of one lane to one row of the state."""
        return self.K // (4 * self.vector)

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.warps * self.tiles * TILE

    @property
    def parts(self) -> int:
        """Blocks of one head."""
        return -(-self.V // self.rows)

    @property
    def whole(self) -> bool:
        """No block has rows beyond V."""
        return self.V % self.rows == 0

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def pitch(self) -> int:
        """From one key in shared memory to the next: the rows that a quarter of a warp reads lie in different banks."""
        return self.K + (32 if self.K >= 64 else 0)

    @property
    def met_pitch(self) -> int:
        """From one row's products to the next: multiples of 16 bytes, in different banks."""
        return 2 * self.drafts + 4

    def blocks(self, indices):
        """Of one launch."""
        return indices.shape[0] * (self.HV * self.parts)

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, a: cute.Tensor, b: cute.Tensor, A_log: cute.Tensor,
        dt_bias: cute.Tensor, states: cute.Tensor, indices: cute.Tensor, offsets: cute.Tensor, buffer: cute.Tensor,
        buffer_rows: cute.Tensor, parents: cute.Tensor, out: cute.Tensor, scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(
            q, k, v, a, b, A_log, dt_bias, states, indices, offsets, buffer, buffer_rows, parents, out, scale
        ).launch(grid=(self.blocks(indices), 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, a: cute.Tensor, b: cute.Tensor, A_log: cute.Tensor,
        dt_bias: cute.Tensor, states: cute.Tensor, indices: cute.Tensor, offsets: cute.Tensor, buffer: cute.Tensor,
        buffer_rows: cute.Tensor, parents: cute.Tensor, out: cute.Tensor, scale: Float32,
    ):  # fmt: skip
        """Block (request, head, part of the rows), the parts fastest.

        The blocks of the first and of the last request also zero the rows outside the offsets.
        """
        D = self.drafts
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first_row = (block % self.parts) * self.rows
        head = (block // self.parts) % self.HV
        request = block // (self.parts * self.HV)

        memory = SmemAllocator()
        words = memory.allocate_tensor(k.element_type, cute.make_layout(2 * D * self.pitch), VECTOR_BYTES)
        met = memory.allocate_tensor(Float32, cute.make_layout(self.rows * self.met_pitch), VECTOR_BYTES)
        coupling = memory.allocate_tensor(Float32, cute.make_layout(D * D), VECTOR_BYTES)
        attention = memory.allocate_tensor(Float32, cute.make_layout(D * D), VECTOR_BYTES)
        gram = memory.allocate_tensor(Float32, cute.make_layout((2 * D, D), stride=(D + 1, 1)), VECTOR_BYTES)
        decays = memory.allocate_tensor(Float32, cute.make_layout((D, D + 1), stride=(D + 1, 1)), VECTOR_BYTES)
        norms = memory.allocate_tensor(Float32, cute.make_layout(2 * D), VECTOR_BYTES)
        gates = memory.allocate_tensor(Float32, cute.make_layout((D, 2)), VECTOR_BYTES)
        factors = memory.allocate_tensor(Float32, cute.make_layout((D, 2)), VECTOR_BYTES)
        links = memory.allocate_tensor(Int32, cute.make_layout(D), VECTOR_BYTES)

        tokens = Int64(out.shape[1])
        first = _clamped(Int64(offsets[request]), tokens)
        last = _clamped(Int64(offsets[request + 1]), tokens)
        slot = Int64(indices[request])
        row = Int32(self.V)  # beyond the last: this thread solves none
        if thread < self.rows:
            row = first_row + thread
        if request == 0:
            self._zero(out, Int32(0), first, head, row)
        if request == indices.shape[0] - 1:
            self._zero(out, last, Int32(tokens), head, row)
        length = cutlass.min(last - first, Int32(self.steps))
        if slot < 0 or slot >= states.shape[0]:
            self._zero(out, first, last, head, row)
        elif length > 0:
            self._zero(out, first + length, last, head, row)
            warp, lane = thread // WARP, thread % WARP
            stored = cute.make_rmem_tensor(
                cute.make_layout((self.vector, self.chunks, 2, self.tiles)), states.element_type
            )
            state = states.iterator + cute.assume(slot * states.stride[0] + head * (self.V * self.K), divby=self.vector)
            warp_row = first_row + warp * (self.tiles * TILE)
            self._load_state(stored, state, warp_row, lane)

            # All loads are under way before any is waited for, and no branch is around one: what lies beyond the last
            # draft reads that one again.
            key_head = head // (self.HV // self.HK)
            q_base = q.iterator + (first * q.stride[1] + key_head * q.stride[2])
            k_base = k.iterator + (first * k.stride[1] + key_head * k.stride[2])
            strides = (q.stride[1], q.stride[3], k.stride[1], k.stride[3])
            vectors = self._read_vectors(q_base, k_base, strides, length, warp, lane)
            token = first + cutlass.min(thread, length - 1)
            gate, strength = a[token, head], b[token, head]
            rate, bias = A_log[head], dt_bias[head]
            v_row = cutlass.min(row, self.V - 1)
            v_base = v.iterator + (first * v.stride[1] + head * v.stride[2] + v_row * v.stride[3])
            values = cute.make_rmem_tensor(self.steps, v.element_type)
            for i in range_constexpr(self.steps):
                values[i] = (v_base + cutlass.min(Int32(i), length - 1) * v.stride[1]).load()

            self._keep_vectors(words, norms, vectors, length, scale, warp, lane)
            if thread < D:
                gates[thread, 0] = number_if(thread < length, decay_of(gate, rate, bias))
                gates[thread, 1] = number_if(thread < length, strength_of(strength))
                if const_expr(self.tree):
                    links[thread] = Int32(0)
                    if thread < length:
                        named = Int64(parents[request, thread])
                        if named >= 0 and named < thread:
                            links[thread] = Int32(named)
            cute.arch.sync_threads()

            self._find_gram(gram, words, warp, lane)
            if warp == self.warps - 1 and lane <= D:
                self._find_decays(decays, gates, links, lane)
            cute.arch.sync_threads()

            for turn in range_constexpr(-(-D * D // self.threads)):
                at = turn * self.threads + thread
                if at < D * D:
                    i, j = at // D, at % D
                    decay = decays[i, j] * norms[j]
                    pull, push = Float32(0.0), Float32(0.0)
                    if j < i:
                        pull = decay * (gates[i, 1] * norms[i]) * gram[i, j]
                    if j <= i:
                        push = decay * norms[D + i] * gram[D + i, j]
                    coupling[at] = pull
                    attention[at] = push
            if thread < D:
                factors[thread, 0] = decays[thread, D] * (gates[thread, 1] * norms[thread])
                factors[thread, 1] = decays[thread, D] * norms[D + thread]
            self._meet(met, stored, words, warp, lane)
            cute.arch.sync_threads()

            if row < self.V:
                target = out.iterator + ((Int64(first) * self.HV + head) * self.V + row)
                self._solve(met, values, coupling, attention, gates, factors, norms, target, length, thread)
            if const_expr(self.stores):
                kept = Int64(buffer_rows[request])
                if kept >= 0 and kept < buffer.shape[0]:
                    cute.arch.sync_threads()
                    place = buffer.iterator + cute.assume(
                        kept * buffer.stride[0] + head * (self.V * self.K), divby=self.vector
                    )
                    for tile in range_constexpr(self.tiles):
                        if warp_row + tile * TILE < self.V:
                            self._store_states(
                                place, buffer.stride[1], stored[None, None, None, tile], words, met, decays, gates,
                                links, length, warp_row + tile * TILE, warp * (self.tiles * TILE) + tile * TILE, lane,
                            )  # fmt: skip

    @cute.jit
    def _zero(self, out: cute.Tensor, begin: Int32, end: Int32, head: Int32, row: Int32):
        """Zero this thread's row of the output of tokens begin..end-1."""
        if row < self.V:
            for token in cutlass.range(begin, end, unroll=1):
                place = out.iterator + ((Int64(token) * self.HV + head) * self.V + row)
                place.store(Float32(0.0).to(out.element_type))

    @cute.jit
    def _load_state(self, stored: cute.Tensor, state: cute.Pointer, warp_row: Int32, lane: Int32):
        if const_expr(not self.whole):
            stored.fill(0.0)
        for tile in range_constexpr(self.tiles):
            if const_expr(self.whole):
                self._load_tile(stored, state, tile, warp_row, lane)
            elif warp_row + tile * TILE < self.V:
                self._load_tile(stored, state, tile, warp_row, lane)

    def _load_tile(self, stored, state, tile: int, warp_row, lane):
        for chunk in range(self.chunks):
            for half in range(2):
                place = vector_at(state, self._place(warp_row + tile * TILE, half, chunk, lane), self.vector)
                stored[None, chunk, half, tile].store(place.load())

    def _place(self, tile_row, half: int, chunk: int, lane):
        """Where in a head's state this lane's elements of one access begin."""
        return (tile_row + half * 8 + lane // 4) * self.K + (chunk * 4 + lane % 4) * self.vector

    def _read_vectors(self, q_base, k_base, strides, length, warp, lane):
        """This lane's elements of the keys, then of the queries; a warp takes a vector at a time."""
        D = self.drafts
        q_token, q_dim, k_token, k_dim = strides
        turns, share = -(-2 * D // self.warps), self.K // WARP
        vectors = cute.make_rmem_tensor(cute.make_layout((share, turns)), k_base.dtype)
        for turn in range(turns):
            vector = cutlass.min(turn * self.warps + warp, 2 * D - 1)
            is_key = vector < D
            base = cutlass.select_(is_key, k_base.toint(), q_base.toint())
            token = cutlass.select_(is_key, k_token, q_token)
            dim = cutlass.select_(is_key, k_dim, q_dim)
            draft = cutlass.min(vector % D, length - 1)
            source = cute.make_ptr(k_base.dtype, base, cute.AddressSpace.gmem) + (draft * token + lane * dim)
            for i in range(share):
                vectors[i, turn] = (source + i * WARP * dim).load()
        return vectors

    @cute.jit
    def _keep_vectors(
        self, words: cute.Tensor, norms: cute.Tensor, vectors: cute.Tensor, length: Int32, scale: Float32, warp: Int32,
        lane: Int32,
    ):  # fmt: skip
        """Keys, then queries, to shared memory, with the factors that make them unit vectors."""
        D = self.drafts
        for turn in range_constexpr(-(-2 * D // self.warps)):
            vector = turn * self.warps + warp
            if vector < 2 * D:
                total = Float32(0.0)
                for i in range_constexpr(self.K // WARP):
                    number = number_if(vector % D < length, vectors[i, turn])
                    total += number * number
                    words[vector * self.pitch + i * WARP + lane] = number.to(words.element_type)
                norm = inverse_norm(cute.arch.warp_reduction_sum(total))
                if vector >= D:
                    norm = norm * scale
                if lane == 0:
                    norms[vector] = norm

    @cute.jit
    def _find_gram(self, gram: cute.Tensor, words: cute.Tensor, warp: Int32, lane: Int32):
        """Products of every key and query with every key."""
        D = self.drafts
        group, quad = lane // 4, lane % 4
        across = max(D // _NARROW, 1)
        products = max(2 * D // TILE, 1) * across
        for turn in range_constexpr(-(-products // self.warps)):
            product = turn * self.warps + warp
            if product < products:
                first, column = (product // across) * TILE, (product % across) * _NARROW
                total = cute.make_rmem_tensor(4, Float32)
                total.fill(0.0)
                for chunk in range_constexpr(self.K // 32):
                    at = chunk * 32 + quad * _NARROW
                    upper = self._words_at(words, first + group, at)
                    lower = self._words_at(words, first + group + 8, at) if const_expr(2 * D >= TILE) else upper
                    add_product(total, upper, lower, self._words_at(words, column + group, at), words.element_type)
                for i in range_constexpr(4):
                    row, j = first + group + 8 * (i // 2), column + 2 * quad + i % 2
                    if row < 2 * D and j < D:
                        gram[row, j] = total[i]

    def _words_at(self, words, vector, column):
        return words_of(vector_at(words.iterator, vector * self.pitch + column, _NARROW).load())

    @cute.jit
    def _find_decays(self, decays: cute.Tensor, gates: cute.Tensor, links: cute.Tensor, j: Int32):
        """Column j of E; column D is e."""
        D = self.drafts
        decay = Float32(0.0)
        if j == D:
            decay = Float32(1.0)
        for i in range_constexpr(D):
            if const_expr(self.tree and i > 0):
                decay = decays[links[i], j]
            decay = decay * gates[i, 0]
            if i == j:
                decay = Float32(1.0)
            decays[i, j] = decay

    @cute.jit
    def _meet(self, met: cute.Tensor, stored: cute.Tensor, words: cute.Tensor, warp: Int32, lane: Int32):
        """Products of this warp's rows of the state with every key and query, to shared memory."""
        group, quad = lane // 4, lane % 4
        across = 2 * self.drafts // _NARROW
        total = cute.make_rmem_tensor(cute.make_layout((4, across, self.tiles)), Float32)
        total.fill(0.0)
        for chunk in range_constexpr(self.chunks):
            for column in range_constexpr(across):
                at = (column * _NARROW + group) * self.pitch + (chunk * 4 + quad) * self.vector
                right = vector_at(words.iterator, at, self.vector).load()
                for tile in range_constexpr(self.tiles):
                    upper = stored[None, chunk, 0, tile].load()
                    lower = stored[None, chunk, 1, tile].load()
                    part = total[None, column, tile]
                    if const_expr(self.same):
                        add_product(part, words_of(upper), words_of(lower), words_of(right), words.element_type)
                    else:
                        add_wide_product(
                            part, upper.to(Float32), lower.to(Float32), right.to(Float32), split=self.state_bytes == 4
                        )
        for tile in range_constexpr(self.tiles):
            for column in range_constexpr(across):
                for i in range_constexpr(4):
                    row = (warp * self.tiles + tile) * TILE + group + 8 * (i // 2)
                    met[row * self.met_pitch + column * _NARROW + 2 * quad + i % 2] = total[i, column, tile]

    @cute.jit
    def _solve(
        self, met: cute.Tensor, values: cute.Tensor, coupling: cute.Tensor, attention: cute.Tensor, gates: cute.Tensor,
        factors: cute.Tensor, norms: cute.Tensor, target: cute.Pointer, length: Int32, row: Int32,
    ):  # fmt: skip
        """Updates and outputs of one row; the updates times the keys' factors replace its products with the keys."""
        D = self.drafts
        mine = cute.make_rmem_tensor(2 * D, Float32)
        for i in range_constexpr(2 * D // 4):
            quarter = vector_at(met.iterator, row * self.met_pitch + 4 * i, 4).load()
            for j in range_constexpr(4):
                mine[4 * i + j] = quarter[j]
        update = cute.make_rmem_tensor(D, Float32)
        for i in range_constexpr(self.steps):
            pull, push = Float32(0.0), Float32(0.0)
            for j in range_constexpr(i):
                pull += coupling[i * D + j] * update[j]
                push += attention[i * D + j] * update[j]
            value = number_if(i < length, values[i])
            update[i] = gates[i, 1] * value - factors[i, 0] * mine[i] - pull
            output = factors[i, 1] * mine[D + i] + push + attention[i * D + i] * update[i]
            if i < length:
                (target + i * (self.HV * self.V)).store(output.to(target.dtype))
            if const_expr(self.stores):
                met[row * self.met_pitch + i] = update[i] * norms[i]

    @cute.jit
    def _store_states(
        self, place: cute.Pointer, step: Int64, stored: cute.Tensor, words: cute.Tensor, met: cute.Tensor,
        decays: cute.Tensor, gates: cute.Tensor, links: cute.Tensor, length: Int32, tile_row: Int32, local_row: Int32,
        lane: Int32,
    ):  # fmt: skip
        """States of 16 rows after each draft, from the one before it or, in a tree, from where its path begins."""
        state = cute.make_rmem_tensor(cute.make_layout((self.vector, self.chunks, 2)), Float32)
        state.store(stored.load().to(Float32))
        for draft in cutlass.range(length, unroll=1):
            if const_expr(self.tree):
                parent = links[draft]
                if draft > 0 and parent != draft - 1:
                    state.store(stored.load().to(Float32) * decays[parent, self.drafts])
                    for j in cutlass.range(parent + 1, unroll=1):
                        if decays[parent, j] != Float32(0.0):
                            self._push(state, Float32(1.0), decays[parent, j], words, met, j, local_row, lane)
            self._push(state, gates[draft, 0], Float32(1.0), words, met, draft, local_row, lane)
            for chunk in range_constexpr(self.chunks):
                for half in range_constexpr(2):
                    at = draft * step + self._place(tile_row, half, chunk, lane)
                    vector_at(place, at, self.vector).store(state[None, chunk, half].load().to(place.dtype))

    def _push(self, state, decay, share, words, met, draft, local_row, lane):
        """state <- decay state + share d k^T."""
        group, quad = lane // 4, lane % 4
        pushes = [share * met[(local_row + half * 8 + group) * self.met_pitch + draft] for half in range(2)]
        for chunk in range(self.chunks):
            at = draft * self.pitch + (chunk * 4 + quad) * self.vector
            key = vector_at(words.iterator, at, self.vector).load().to(Float32)
            for half in range(2):
                for i in range(self.vector):
                    state[i, chunk, half] = decay * state[i, chunk, half] + pushes[half] * key[i]


def _clamped(offset, tokens):
    """Int32 between 0 and the number of tokens."""
    return Int32(cutlass.min(cutlass.max(offset, Int64(0)), tokens))
