"""Runs a kernel's PTX on the CPU, all threads of a grid side by side, with every access checked.

Stands in for a GPU where there is none: an access outside the tensors given, a misaligned one, a register or a shared
byte read before it is written (it holds NaN) all show. Warps run one after the other up to each barrier, in one order
or the other, so that a missing barrier shows too. Not a model of speed, nor of the last bit of approximations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.backends.cutedsl import ptx_arithmetic as arithmetic
from tests.backends.cutedsl.ptx_program import Instruction
from tests.backends.cutedsl.ptx_program import Program

WARP = 32
_SHARED_BASE = 1 << 24
_TYPES = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f32": np.uint32, "u32": np.uint32, "u16": np.uint16,
          "s32": np.uint32, "u64": np.uint64, "s64": np.uint64, "s16": np.uint16}  # fmt: skip


@dataclass(frozen=True)
class Region:
    """Memory that the kernel may touch."""

    begin: int
    data: np.ndarray


class Machine:
    """One launch. `arguments` are the bytes of each parameter, `regions` the memory of every tensor."""

    def __init__(self, program: Program, grid: int, arguments: list[bytes], regions: list[Region], *,
                 reverse: bool = False, shared_bytes: int = 99 << 10, most_steps: int = 1_000_000) -> None:  # fmt: skip
        self.program, self.grid, self.reverse = program, grid, reverse
        self.count = grid * program.threads
        assert [len(given) for given in arguments] == [size for _, size in program.parameters]
        names = (name for name, _ in program.parameters)
        self.parameters = dict(zip(names, (np.frombuffer(given, dtype=np.uint8) for given in arguments), strict=True))
        self.regions = sorted(regions, key=lambda region: region.begin)
        self.begins = np.array([region.begin for region in self.regions], dtype=np.int64)
        self.shared = np.full((grid, shared_bytes), 0xFF, dtype=np.uint8)
        self.registers: dict[str, np.ndarray] = {}
        self.thread = np.tile(np.arange(program.threads), grid)
        self.block = np.repeat(np.arange(grid), program.threads)
        self.counter = np.zeros(self.count, dtype=np.int64)
        self.waiting = np.zeros(self.count, dtype=bool)
        self.done = np.zeros(self.count, dtype=bool)
        self.steps, self.most_steps = 0, most_steps

    def run(self) -> None:
        """Until every thread has returned."""
        warps = range(self.program.threads // WARP)
        order = list(reversed(warps)) if self.reverse else list(warps)
        while not self.done.all():
            for warp in order:
                self._run_to_barrier(self.thread // WARP == warp)
            self._release()

    def _run_to_barrier(self, chosen: np.ndarray) -> None:
        while True:
            ready = chosen & ~self.done & ~self.waiting
            if not ready.any():
                return
            at = int(self.counter[ready].min())
            self._step(np.flatnonzero(ready & (self.counter == at)), at)

    def _release(self) -> None:
        blocks = (self.waiting | self.done).reshape(self.grid, -1).all(axis=1)
        released = self.waiting & blocks[self.block]
        self.waiting[released] = False

    def _step(self, active: np.ndarray, at: int) -> None:
        self.steps += 1
        assert self.steps < self.most_steps, "it doesn't end"
        instruction = self.program.instructions[at]
        self.counter[active] = at + 1
        if instruction.guard:
            flag = self.registers[instruction.guard][active]
            active = active[~flag if instruction.negated else flag]
            if active.size == 0:
                return
        try:
            self._execute(instruction, active)
        except Exception as error:
            raise RuntimeError(f"{error} in: {instruction.line}") from error

    def _execute(self, instruction: Instruction, active: np.ndarray) -> None:
        parts, operands = instruction.parts, instruction.operands
        match parts[0]:
            case "bra":
                self.counter[active] = self.program.labels[operands[0]]
            case "ret" | "exit":
                self.done[active] = True
            case "bar" | "barrier":
                if "warp" not in parts:
                    self.waiting[active] = True
            case "ld" | "ldu":
                self._load(parts, operands, active)
            case "st":
                self._store(parts, operands, active)
            case "shfl":
                self._shuffle(parts, operands, active)
            case "mma":
                self._multiply(parts, operands, active)
            case _:
                self._write_result(parts, operands, active)

    def _write_result(self, parts: list[str], operands, active: np.ndarray) -> None:
        target, *sources = operands
        if parts[0] == "mov" and isinstance(target, tuple):
            value = self.read(sources[0], parts[1], active)
            width = 8 * value.dtype.itemsize // len(target)
            for position, name in enumerate(target):
                if name != "_":
                    self.write(name, (value >> np.array(position * width, value.dtype)), active)
            return
        if parts[0] == "mov" and isinstance(sources[0], tuple):
            kind = {"b32": np.uint32, "b64": np.uint64}[parts[1]]
            pieces = [self.read(name, "b16" if parts[1] == "b32" else "b32", active) for name in sources[0]]
            width = 8 * np.dtype(kind).itemsize // len(pieces)
            value = np.zeros(active.size, dtype=kind)
            for position, piece in enumerate(pieces):
                value |= piece.astype(kind) << np.array(position * width, kind)
            self.write(target, value, active)
            return
        types = arithmetic.source_types(parts, len(sources))
        values = [self.read(name, kind, active) for name, kind in zip(sources, types, strict=True)]
        self.write(target, arithmetic.result(parts, values), active)

    def read(self, name: str, kind: str, active: np.ndarray) -> np.ndarray:
        """Bits of an operand, one number for each active thread."""
        dtype = bool if kind == "pred" else _TYPES.get(kind, np.uint32)
        if name.startswith("%tid") or name.startswith("%ctaid") or name.startswith("%ntid"):
            axis = name[-1] == "x"
            source = {"%tid": self.thread, "%cta": self.block}.get(name[:4], np.full(self.count, self.program.threads))
            return (source[active] if axis else np.zeros(active.size)).astype(dtype)
        if name.startswith("%"):
            value = self.registers[name][active]
            return value if value.dtype == dtype else value.astype(dtype)
        if name in self.program.shared:
            return np.full(active.size, _SHARED_BASE + self.program.shared[name], dtype=dtype)
        if name.startswith("0f"):
            return np.full(active.size, int(name[2:], 16), dtype=np.uint32)
        number = int(name, 0)
        return np.full(active.size, number & ((1 << (8 * np.dtype(dtype).itemsize)) - 1), dtype=dtype)

    def write(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        kind = bool if name.startswith("%p") else {"%rs": np.uint16, "%rd": np.uint64}.get(name[:3], np.uint32)
        if name not in self.registers:
            self.registers[name] = np.full(self.count, kind is not bool and np.iinfo(kind).max, dtype=kind)
        self.registers[name][active] = value.astype(kind)

    def _address(self, text: str, active: np.ndarray) -> np.ndarray:
        base, _, offset = text.strip("[]").partition("+")
        if base.startswith("%"):
            start = self.registers[base][active].astype(np.int64)
        else:
            start = np.full(active.size, _SHARED_BASE + self.program.shared[base], dtype=np.int64)
        return start + (int(offset) if offset else 0)

    def _load(self, parts: list[str], operands, active: np.ndarray) -> None:
        targets = operands[0] if isinstance(operands[0], tuple) else (operands[0],)
        kind = np.dtype(_TYPES[parts[-1]])
        if "param" in parts:
            name, _, offset = operands[1].strip("[]").partition("+")
            at = int(offset or 0)
            raw = np.tile(self.parameters[name][at : at + len(targets) * kind.itemsize], (active.size, 1))
        else:
            raw = self._bytes(parts, self._address(operands[1], active), len(targets) * kind.itemsize, active)
        values = np.ascontiguousarray(raw).view(kind).reshape(active.size, -1)
        for position, name in enumerate(targets):
            self.write(name, values[:, position], active)

    def _store(self, parts: list[str], operands, active: np.ndarray) -> None:
        sources = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
        values = np.stack([self.read(name, parts[-1], active) for name in sources], axis=1)
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(active.size, -1)
        self._bytes(parts, self._address(operands[0], active), raw.shape[1], active, raw)

    def _bytes(self, parts: list[str], addresses: np.ndarray, size: int, active: np.ndarray, written=None):
        assert (addresses % size == 0).all(), "misaligned access"
        columns = np.arange(size)
        if "shared" in parts:
            places = (self.block[active][:, None], (addresses - _SHARED_BASE)[:, None] + columns)
            assert (addresses >= _SHARED_BASE).all()
            if written is None:
                return self.shared[places]
            self.shared[places] = written
            return None
        owners = np.searchsorted(self.begins, addresses, side="right") - 1
        result = np.zeros((active.size, size), dtype=np.uint8)
        for owner in np.unique(owners):
            mine = owners == owner
            region = self.regions[max(int(owner), 0)]
            offsets = addresses[mine] - region.begin
            inside = owner >= 0 and bool((offsets + size <= region.data.size).all())
            assert inside, "access outside every tensor"
            if written is None:
                result[mine] = region.data[offsets[:, None] + columns]
            else:
                region.data[offsets[:, None] + columns] = written[mine]
        return result

    def _shuffle(self, parts: list[str], operands, active: np.ndarray) -> None:
        target, source, offset, clamp, _ = operands if len(operands) == 5 else (operands[0], *operands[2:])
        lanes = active % WARP
        step = self.read(offset, "b32", active).astype(np.int64)
        assert int(clamp, 0) == WARP - 1
        lane = {"bfly": lanes ^ step, "idx": step & (WARP - 1)}[parts[2]]
        senders = active - lanes + lane
        assert np.isin(senders, active).all(), "shuffle from a thread that takes no part"
        self.write(target, self.registers[source][senders], active)

    def _multiply(self, parts: list[str], operands, active: np.ndarray) -> None:
        assert active.size % WARP == 0, "mma by a part of a warp"
        target, *sources = operands
        a, b, c = ([self.read(name, "b32", active) for name in group] for group in sources)
        for name, value in zip(target, arithmetic.matrix_product(parts, a, b, c), strict=True):
            self.write(name, value, active)
