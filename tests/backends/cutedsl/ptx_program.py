"""PTX as data: the entry's parameters, shared memory and instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from dataclasses import field

_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)(?:\[(\d*)\])?")
_BYTES = {"f32": 4, "b32": 4, "u32": 4, "s32": 4, "b64": 8, "u64": 8, "s64": 8}


@dataclass(frozen=True)
class Instruction:
    """One line: `@guard opcode operands`; a vector operand is a tuple."""

    opcode: str
    operands: tuple[str | tuple[str, ...], ...]
    guard: str = ""
    negated: bool = False
    line: str = ""

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


@dataclass
class Program:
    """One kernel."""

    parameters: list[tuple[str, int]] = field(default_factory=list)
    """Name and bytes, in order."""
    threads: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    """Address of each shared variable."""


def parse(text: str) -> Program:
    """The one entry of a module."""
    program = Program()
    text = re.sub(r"//[^\n]*", "", text)
    used = 0
    for align, name, size in _SHARED.findall(text):
        used = -(-used // int(align)) * int(align)
        program.shared[name] = used
        used += int(size or 0)
    head, _, body = text.partition(".entry")[2].partition("{")
    for kind, name, size in _PARAMETER.findall(head):
        program.parameters.append((name, int(size) if size else _BYTES[kind]))
    threads = re.search(r"\.reqntid\s+(\d+)", head)
    assert threads is not None
    program.threads = int(threads[1])
    statements = re.sub(r"(\$[\w]+):", r"\1:;", body)
    for statement in statements.split(";"):
        line = " ".join(statement.split()).strip("{} ") if "," not in statement else " ".join(statement.split())
        line = line.removeprefix("{ ").strip()
        if not line or line.startswith(".") or line == "}":
            continue
        if line.endswith(":"):
            program.labels[line[:-1]] = len(program.instructions)
            continue
        program.instructions.append(_instruction(line))
    return program


def _instruction(line: str) -> Instruction:
    guard, negated, rest = "", False, line
    if line.startswith("@"):
        name, _, rest = line[1:].partition(" ")
        negated, guard = name.startswith("!"), name.removeprefix("!")
    opcode, _, operands = rest.strip().partition(" ")
    return Instruction(opcode, tuple(_operands(operands)), guard, negated, line)


def _operands(text: str) -> list[str | tuple[str, ...]]:
    result: list[str | tuple[str, ...]] = []
    for vector, plain in re.findall(r"\{([^}]*)\}|([^,{}]+)", text):
        if vector:
            result.append(tuple(part.strip() for part in vector.split(",")))
        elif plain.strip():
            result += [part.strip() for part in plain.strip().split("|")]
    return result
