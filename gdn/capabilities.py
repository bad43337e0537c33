"""Capability manifests: what a backend declares, as data that reads without torch.

A manifest holds rows. Within one row every field must match (AND); a backend serves an operation if any of its rows
matches (OR). Rows state what was shown, `evidence` says on what.
"""

from __future__ import annotations

from typing import Annotated
from typing import Any
from typing import Final
from typing import Literal

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel
from pydantic import BeforeValidator
from pydantic import ConfigDict
from pydantic import Field
from pydantic import field_validator
from pydantic import model_validator

from gdn.types import DType
from gdn.types import RowOperation
from gdn.types import StateLayout

SCHEMA_VERSION: Final = 1
"""Version of the manifest schema that this host reads."""


class Frozen(BaseModel):
    """Base of all manifest models: immutable, closed to unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def _as_tuple(value: Any) -> Any:
    """Let a single value stand for a tuple of one."""
    if value is None or isinstance(value, tuple | list | set | frozenset):
        return value
    return (value,)


class SMRange(Frozen):
    """A closed range of NVIDIA compute capabilities, written major*10 + minor (SM90, SM103, SM120).

    Capabilities are not a total order of features (SM120 lacks what SM100 has), so both ends are stated.
    """

    min: int = Field(ge=50, le=999)
    max: int = Field(ge=50, le=999)

    @model_validator(mode="before")
    @classmethod
    def _accept_pair(cls, value: Any) -> Any:
        if isinstance(value, int):
            return {"min": value, "max": value}
        if isinstance(value, tuple | list) and len(value) == 2:
            return {"min": value[0], "max": value[1]}
        return value

    @model_validator(mode="after")
    def _check_order(self) -> SMRange:
        if self.min > self.max:
            raise ValueError(f"sm_range min={self.min} exceeds max={self.max}")
        return self

    def __contains__(self, sm: int) -> bool:
        return self.min <= sm <= self.max

    def __str__(self) -> str:
        return f"{self.min}" if self.min == self.max else f"{self.min}-{self.max}"


def _as_ranges(value: Any) -> Any:
    """Let one range, or one pair of numbers, stand for a tuple of ranges."""
    if isinstance(value, tuple | list):
        pair = len(value) == 2 and all(isinstance(end, int) for end in value)
        return (tuple(value),) if pair else value
    return (value,)


class CudaTarget(Frozen):
    """NVIDIA GPUs."""

    platform: Literal["cuda"] = "cuda"
    sm_range: Annotated[tuple[SMRange, ...], BeforeValidator(_as_ranges), Field(min_length=1)]
    runtime: str = ""
    """PEP 440 specifier on the CUDA runtime, such as ">=13"; empty: any."""

    @field_validator("runtime")
    @classmethod
    def _check_runtime(cls, value: str) -> str:
        try:
            SpecifierSet(value)
        except InvalidSpecifier as error:
            raise ValueError(f"runtime={value!r} is not a PEP 440 specifier") from error
        return value


class RocmTarget(Frozen):
    """AMD GPUs."""

    platform: Literal["rocm"] = "rocm"
    gfx: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Architectures such as "gfx942"; empty: any."""


class NpuTarget(Frozen):
    """Ascend NPUs."""

    platform: Literal["npu"] = "npu"
    soc: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Chips such as "ascend910b"; empty: any."""


class CpuTarget(Frozen):
    """CPUs."""

    platform: Literal["cpu"] = "cpu"
    features: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Instruction sets that all must be present, such as "avx512_bf16"; empty: none needed."""


Target = Annotated[CudaTarget | RocmTarget | NpuTarget | CpuTarget, Field(discriminator="platform")]


class Dims(Frozen):
    """Which sizes of one axis are served: a list, or a closed range with a step; by default every size."""

    values: tuple[int, ...] = ()
    """Exactly these; empty: use the range."""
    min: int = Field(default=1, ge=1)
    max: int | None = Field(default=None, ge=1)
    multiple_of: int = Field(default=1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _accept_list(cls, value: Any) -> Any:
        if isinstance(value, int):
            return {"values": (value,)}
        if isinstance(value, tuple | list | set | frozenset):
            return {"values": tuple(sorted(value))}
        return value

    def __contains__(self, size: int) -> bool:
        if self.values:
            return size in self.values
        return self.min <= size and (self.max is None or size <= self.max) and size % self.multiple_of == 0

    def __str__(self) -> str:
        if self.values:
            return ",".join(map(str, self.values))
        if self.min == 1 and self.max is None:
            span = "any"
        else:
            span = f"{self.min}-{self.max}" if self.max is not None else f">={self.min}"
        return span if self.multiple_of == 1 else f"{span} in steps of {self.multiple_of}"


class HeadDims(Frozen):
    """Key and value head dims that a row serves."""

    k: Dims = Dims()
    v: Dims = Dims()


Factory = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""Import string "package.module:function" of a callable that takes a `BindContext` and returns the operation."""

Evidence = Annotated[str, Field(pattern=r"^(ran|compiled|interpreted|lowered|contract)(:[\w.+-]+)?$")]


class CapabilityRow(Frozen):
    """One row: one operation on one kind of device under these limits."""

    op: RowOperation
    target: Target
    head_dims: HeadDims = HeadDims()
    head_ratios: Dims = Dims()
    """HV // HK."""
    dtypes: frozenset[DType]
    """Activation dtypes."""
    state_dtypes: frozenset[DType] = frozenset({"float32", "float16", "bfloat16"})
    """Dtypes of the recurrent state; ignored by gating and qkv_split."""
    state_layouts: frozenset[StateLayout] = frozenset({"vk"})
    state_alignment: int = Field(default=1, ge=1)
    """Bytes to which each slot's address must be aligned."""
    reserved_slots: int = Field(default=0, ge=0)
    """Scratch slots that the pool must hold beyond those of requests."""
    strided_state: bool = False
    """Pools whose slot stride exceeds the state's size are handled without a copy."""
    state_checkpoints: bool = False
    """Extend only: chunk states and snapshots are delivered."""
    packed_decode: bool = False
    """Decode only: `packed_factory` builds decode over packed mixed_qkv."""
    replay: bool = False
    """Decode only: `replay_factory` builds decode over the ReplaySSM ring."""
    max_draft_tokens: int | None = Field(default=None, ge=1)
    """Verify only: the largest D; None: no limit."""
    tree: bool = False
    """Verify only: `tree_factory` builds verify over draft trees."""
    conv_widths: Dims = Dims()
    """conv_extend and conv_update only: W."""
    requires: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """PEP 508 requirements, checked against installed distributions before anything is imported."""
    deterministic: bool = False
    cuda_graph: bool = False
    """Safe to capture in a CUDA graph after one warm-up call."""
    maturity: Literal["stable", "experimental"] | None = None
    """Overrides the manifest's maturity for this row."""
    note: str = ""
    """A limit or a choice that an operator should read in reports."""
    factory: Factory
    packed_factory: Factory | None = None
    replay_factory: Factory | None = None
    tree_factory: Factory | None = None
    evidence: Annotated[tuple[Evidence, ...], BeforeValidator(_as_tuple)] = ()
    """On what the row was checked: "ran:sm90", "compiled:sm100a", "interpreted", "lowered:910b", "contract"."""

    @field_validator("requires")
    @classmethod
    def _check_requires(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                Requirement(text)
            except InvalidRequirement as error:
                raise ValueError(f"requires entry {text!r} is not a PEP 508 requirement") from error
        return value

    @model_validator(mode="after")
    def _check_flags(self) -> CapabilityRow:
        for flag, factory, op in _FLAGS:
            if getattr(self, flag) and self.op != op:
                raise ValueError(f"{flag}=True belongs to op={op!r} rows, not to op={self.op!r}")
            if getattr(self, flag) != (getattr(self, factory) is not None):
                raise ValueError(f"{flag}={getattr(self, flag)} and {factory}={getattr(self, factory)!r} disagree")
        if self.state_checkpoints and self.op != "extend":
            raise ValueError(f"state_checkpoints=True belongs to op='extend' rows, not to op={self.op!r}")
        if self.max_draft_tokens is not None and self.op != "verify":
            raise ValueError(f"max_draft_tokens belongs to op='verify' rows, not to op={self.op!r}")
        if not self.dtypes:
            raise ValueError("dtypes is empty: the row could never match")
        if not self.state_dtypes:
            raise ValueError("state_dtypes is empty: the row could never match")
        return self


_FLAGS: Final = (
    ("packed_decode", "packed_factory", "decode"),
    ("replay", "replay_factory", "decode"),
    ("tree", "tree_factory", "verify"),
)


class BackendManifest(Frozen):
    """All that one backend declares about itself."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{1,31}$")
    summary: str = ""
    tier: Literal["preferred", "normal", "fallback", "reference"] = "normal"
    """Where the backend stands if the host's ranking table doesn't name it."""
    maturity: Literal["stable", "experimental"] = "stable"
    """Experimental rows are chosen only when the backend is named by require or prefer."""
    capabilities: tuple[CapabilityRow, ...] = ()

    def rows(self, op: RowOperation) -> tuple[CapabilityRow, ...]:
        """The rows of one operation, in declared order."""
        return tuple(row for row in self.capabilities if row.op == op)

    def maturity_of(self, row: CapabilityRow) -> str:
        return row.maturity or self.maturity


def manifest_schema() -> dict[str, Any]:
    """The published JSON schema of `BackendManifest`."""
    from gdn._attribute_docs import attribute_docs

    schema = BackendManifest.model_json_schema()
    models = {model.__name__: model for model in Frozen.__subclasses__()}
    for name, definition in {**schema["$defs"], BackendManifest.__name__: schema}.items():
        for field, text in attribute_docs(models[name]).items():
            definition["properties"][field]["description"] = text
    return schema
