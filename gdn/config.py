"""What a server asks for: the geometry of the model on one rank and the features it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import Literal

from pydantic import BaseModel
from pydantic import ConfigDict
from pydantic import Field
from pydantic import field_validator
from pydantic import model_validator

from gdn.errors import ConfigError
from gdn.types import DTYPE_BYTES
from gdn.types import DType


def dtype_name(value: Any) -> Any:
    """The name of a dtype given as a string or as a `torch.dtype` ("torch.bfloat16" -> "bfloat16")."""
    return str(value).removeprefix("torch.")


class GdnConfig(BaseModel):
    """One Gated DeltaNet layer group as one rank sees it. Frozen, hashable, free of torch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_k_heads: int = Field(ge=1)
    """HK, key (and query) heads on this rank."""
    num_v_heads: int = Field(ge=1)
    """HV, value heads on this rank; a multiple of HK."""
    head_k_dim: int = Field(ge=1)
    """K."""
    head_v_dim: int = Field(ge=1)
    """V."""
    conv_kernel_size: int = Field(default=4, ge=1)
    """W, taps of the depthwise causal convolution."""
    activation_dtype: DType = "bfloat16"
    state_dtype: DType | Literal["auto"] = "float32"
    """Element type of the recurrent state; "auto" lets the resolver choose it."""
    max_draft_tokens: int = Field(default=0, ge=0)
    """D, draft tokens per request that verify gets; 0 asks for no speculation."""
    tree_drafts: bool = False
    """Verify gets `retrieve_parent_token`."""
    replay_window: int = Field(default=0, ge=0)
    """L, length of the ReplaySSM ring; 0 switches it off."""
    strided_state: bool = False
    """The slot stride exceeds HV*V*K (page-major pools)."""
    state_checkpoints: bool = False
    """Extend must deliver states at chunk boundaries (prefix caching)."""
    max_slots: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the largest extend call, where the server knows it."""
    deterministic: bool = False
    """Equal inputs must give equal bits, whatever else is in the batch."""
    cuda_graph: bool = False
    """Decode and verify will be captured in a CUDA graph."""

    @field_validator("activation_dtype", "state_dtype", mode="before")
    @classmethod
    def _accept_torch_dtype(cls, value: Any) -> Any:
        return dtype_name(value)

    @model_validator(mode="after")
    def _check_heads(self) -> GdnConfig:
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads={self.num_v_heads} is not a multiple of num_k_heads={self.num_k_heads}: "
                "every key head serves the same number of value heads"
            )
        if self.tree_drafts and not self.max_draft_tokens:
            raise ValueError("tree_drafts=True needs max_draft_tokens >= 1, got 0")
        return self

    @property
    def head_ratio(self) -> int:
        """Value heads per key head, HV // HK."""
        return self.num_v_heads // self.num_k_heads

    @property
    def conv_dim(self) -> int:
        """Channels of `mixed_qkv` and of the convolution: 2*HK*K + HV*V."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def shard(self, tp_size: int) -> GdnConfig:
        """The same layer group on one of `tp_size` tensor-parallel ranks.

        Raises:
            ConfigError: the head counts don't divide.
        """
        for name in ("num_k_heads", "num_v_heads"):
            heads = getattr(self, name)
            if tp_size < 1 or heads % tp_size:
                raise ConfigError(f"{name}={heads} can't be divided over tp_size={tp_size} ranks")
        heads = {"num_k_heads": self.num_k_heads // tp_size, "num_v_heads": self.num_v_heads // tp_size}
        return self.model_validate({**self.model_dump(), **heads})

    def state_bytes_per_slot(self, conv_dtype: str | None = None) -> int:
        """Bytes that one slot of one layer takes: recurrent state plus conv window of W-1 columns."""
        if self.state_dtype == "auto":
            raise ConfigError('state_dtype="auto" has no size before it is resolved; see ResolvedTriple.state.dtype')
        recurrent = self.num_v_heads * self.head_v_dim * self.head_k_dim * DTYPE_BYTES[self.state_dtype]
        conv = self.conv_dim * (self.conv_kernel_size - 1) * DTYPE_BYTES[conv_dtype or self.activation_dtype]
        return recurrent + conv

    @classmethod
    def from_hf(cls, hf_config: Any, **overrides: Any) -> GdnConfig:
        """Read the `linear_*` fields of a Qwen3-Next or Qwen3.5 style config (an object or a mapping).

        A composite config (vision and text) is read through its `text_config`. `overrides` win.

        Raises:
            ConfigError: a needed field is missing.
        """

        def read(source: Any, name: str) -> Any:
            return source.get(name) if isinstance(source, dict) else getattr(source, name, None)

        source = hf_config
        if read(source, "linear_num_key_heads") is None and read(source, "text_config") is not None:
            source = read(source, "text_config")
        fields: dict[str, Any] = {}
        for ours, theirs in _HF_FIELDS.items():
            value = read(source, theirs)
            if value is None:
                raise ConfigError(f"{type(hf_config).__name__} has no field {theirs}: not a Gated DeltaNet config")
            fields[ours] = value
        if "activation_dtype" not in overrides and (dtype := _dtype_of(read, source, hf_config)) is not None:
            fields["activation_dtype"] = dtype
        if (state := read(source, "mamba_ssm_dtype")) is not None:
            fields["state_dtype"] = state
        return cls(**{**fields, **overrides})


def _dtype_of(read: Callable[[Any, str], Any], *sources: Any) -> Any:
    """The first dtype that a config names; "torch_dtype" is the field's older name."""
    for name in ("dtype", "torch_dtype"):
        for source in sources:
            if (dtype := read(source, name)) is not None:
                return dtype
    return None


_HF_FIELDS = {
    "num_k_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "head_k_dim": "linear_key_head_dim",
    "head_v_dim": "linear_value_head_dim",
    "conv_kernel_size": "linear_conv_kernel_dim",
}

_PRESET_HEADS = {
    "qwen3-next-80b-a3b": (16, 32),
    "qwen3.5-35b-a3b": (16, 32),
    "qwen3.5-27b": (16, 48),
    "qwen3.5-397b-a17b": (16, 64),
    "gigachat3.5": (8, 16),
}


def presets() -> dict[str, GdnConfig]:
    """Configs of public models at tensor-parallel size 1 (K = V = 128, W = 4), by name."""
    return {
        name: GdnConfig(num_k_heads=hk, num_v_heads=hv, head_k_dim=128, head_v_dim=128)
        for name, (hk, hv) in _PRESET_HEADS.items()
    }
