"""Route the Gated DeltaNet layers of a transformers model through `gdn`.

    triple = gdn.integrations.transformers.enable(model)
    model.generate(...)
    gdn.integrations.transformers.disable(model)

Each layer's own forward runs unchanged, but finds gdn's operations under the names of the four functions that it calls.
Nothing outside the model's layers is rebound, so other models in the process are not touched.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

from gdn.api import resolve
from gdn.config import GdnConfig
from gdn.errors import ConfigError
from gdn.triple import ResolvedTriple

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

logger = logging.getLogger("gdn.integrations.transformers")

_CHUNKED: Final = "torch_chunk_gated_delta_rule"
_RECURRENT: Final = "torch_recurrent_gated_delta_rule"
_CONV: Final = "causal_conv1d_fn"
_CONV_STEP: Final = "causal_conv1d_update"
_FUNCTIONS: Final = (_CHUNKED, _RECURRENT, _CONV, _CONV_STEP)

_enabled: weakref.WeakSet[Any] = weakref.WeakSet()


def enable(model: Module, *, device: Any = None, **selection: Any) -> ResolvedTriple:
    """Let gdn serve every Gated DeltaNet layer of `model`, in inference; calls that need gradients stay with
    transformers' own functions.

    Args:
        model: a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model, or any module that holds such layers.
        device: as for `gdn.resolve`; None: the device of the model's parameters.
        selection: `require`, `prefer`, `exclude` of `gdn.resolve`.

    Returns:
        The triple that serves the layers, over fp32 states.

    Raises:
        ImportError: transformers is not installed.
        ConfigError: the model has no such layer, or accelerate's hooks hold its weights elsewhere.
        NoBackendError, RequirementError: see `gdn.resolve`.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError('gdn.integrations.transformers needs transformers: pip install "gdn[hf]"') from error
    layers = list(_gdn_layers(model))
    if not layers:
        names = ", ".join(_FUNCTIONS)
        raise ConfigError(
            f"{type(model).__name__} has no Gated DeltaNet layer that calls {names} "
            f"(transformers {transformers.__version__})"
        )
    if any(hasattr(layer.conv1d, "_hf_hook") for layer in layers):
        raise ConfigError("accelerate's offloading hooks hold the layers' weights: load the model onto one device")
    disable(model)
    weight = layers[0].conv1d.weight
    config = GdnConfig.from_hf(_config_of(layers[0], model), activation_dtype=weight.dtype, state_dtype="float32")
    triple = resolve(config, device=str(weight.device) if device is None else device, **selection)
    for layer in layers:
        layer.forward = _with_functions(layer, _Functions(triple))
        _enabled.add(layer)
    return triple


def disable(model: Module) -> None:
    """Give the layers of `model` their own functions back; does nothing where gdn isn't enabled."""
    for layer in model.modules():
        if layer in _enabled:
            del layer.forward
            _enabled.discard(layer)


def _gdn_layers(model: Module) -> Iterator[Any]:
    for layer in model.modules():
        forward = inspect.unwrap(type(layer).forward)
        known = getattr(forward, "__globals__", {})
        if hasattr(layer, "A_log") and hasattr(layer, "conv1d") and all(name in known for name in _FUNCTIONS):
            yield layer


def _config_of(layer: Any, model: Any) -> Any:
    """The model's config, or the layer's own sizes where a bare module was given."""
    if (config := getattr(model, "config", None)) is not None:
        return config
    return {
        "linear_num_key_heads": layer.num_k_heads,
        "linear_num_value_heads": layer.num_v_heads,
        "linear_key_head_dim": layer.head_k_dim,
        "linear_value_head_dim": layer.head_v_dim,
        "linear_conv_kernel_dim": layer.conv_kernel_size,
    }


def _with_functions(layer: Any, functions: _Functions) -> Any:
    """The layer's forward, bound to it, with the four global names it calls replaced."""
    forward = inspect.unwrap(type(layer).forward)
    original = forward.__globals__
    names = {
        _CHUNKED: functools.partial(functions.delta_rule, original[_CHUNKED]),
        _RECURRENT: functools.partial(functions.delta_rule, original[_RECURRENT]),
        _CONV: functools.partial(functions.conv, original[_CONV]),
        _CONV_STEP: functools.partial(functions.conv_step, original[_CONV_STEP]),
    }
    replaced = types.FunctionType(
        forward.__code__, {**original, **names}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    replaced.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(functools.wraps(forward)(replaced), layer)


class _Functions:
    """transformers' functions over one triple. Batches `[B, T, ...]` are B packed sequences of T tokens."""

    def __init__(self, triple: ResolvedTriple) -> None:
        self._triple = triple

    def delta_rule(
        self, original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, **rest: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The chunked and the recurrent rule: q, k `[B, T, HK, K]`, v `[B, T, HV, V]`, states `[B, HV, K, V]`.

        The state that is returned is a view `[B, HV, K, V]` of gdn's `[B, HV, V, K]`; transformers' cache keeps these
        strides, so the next step finds its pool there and updates it in place.
        """
        if not use_qk_l2norm_in_kernel or _needs_gradients(query, key, value, g, beta):
            packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
            result: tuple[Tensor, Tensor | None] = original(
                query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **packed, **rest,
            )  # fmt: skip
            return result
        batch, steps, value_heads, value_dim = value.shape
        sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        pool = _pool_of(initial_state, (sequences, value_heads, value_dim, key.shape[3]), value.device)
        q, k, v = (x.reshape(1, batch * steps, *x.shape[2:]) for x in (query, key, value))
        slots, offsets = _packing(sequences, steps, value.device)
        if steps == 1 and cu_seqlens is None:
            zeros = g.new_zeros(value_heads)
            a, b = _inverse_gates(g.reshape(batch, -1).float(), beta.reshape(batch, -1).float())
            out = self._triple.decode(
                q, k, v, a, b, A_log=zeros, dt_bias=zeros, ssm_states=pool, cache_indices=slots
            )  # fmt: skip
        else:
            g, beta = (x.reshape(1, batch * steps, -1).float() for x in (g, beta))
            offsets = offsets if cu_seqlens is None else cu_seqlens
            out = self._triple.extend(
                q, k, v, g, beta, ssm_states=pool, cache_indices=slots, query_start_loc=offsets
            ).output  # fmt: skip
        state = pool.transpose(-1, -2)
        if initial_state is not None and initial_state.data_ptr() == pool.data_ptr():
            state = initial_state
        return out.view(batch, steps, value_heads, value_dim), state if output_final_state else None

    def conv(
        self, original: Callable[..., Any], hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None, **rest: Any,
    ) -> Tensor:  # fmt: skip
        """The convolution of whole sequences `[B, dim, T]`, without a state: earlier inputs stand in front of them."""
        function = self._triple.conv_extend
        if function is None or _needs_gradients(hidden_states, weight) or activation not in ("silu", "swish", None):
            result: Tensor = original(hidden_states, weight, bias, activation=activation, **rest)
            return result
        batch, dim, steps = hidden_states.shape
        packed = rest.get("cu_seq_lens_q")
        sequences = batch if packed is None else packed.numel() - 1
        slots, offsets = _packing(sequences, steps, hidden_states.device)
        scratch = hidden_states.new_zeros(sequences, dim, max(weight.shape[1] - 1, 1))
        rows = hidden_states.transpose(1, 2).reshape(batch * steps, dim)
        out = function(
            rows.t(), weight, bias, conv_states=scratch, query_start_loc=offsets if packed is None else packed,
            cache_indices=slots, has_initial_state=_none_known(sequences, rows.device), activation=activation,
        )  # fmt: skip
        return out.t().reshape(batch, steps, dim).transpose(1, 2)

    def conv_step(
        self, original: Callable[..., Any], hidden_states: Tensor, conv_state: Tensor, weight: Tensor,
        bias: Tensor | None = None, activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        """One step `[B, dim, 1]`; the last W-1 columns of the state are the window, older inputs precede it."""
        function = self._triple.conv_update
        if function is None or _needs_gradients(hidden_states, weight) or activation not in ("silu", "swish", None):
            result: Tensor = original(hidden_states, conv_state, weight, bias, activation)
            return result
        older = conv_state.shape[2] - (weight.shape[1] - 1)
        if older:
            conv_state[:, :, :older].copy_(conv_state[:, :, 1 : older + 1].clone())
        return function(hidden_states, conv_state[:, :, older:], weight, bias, activation=activation)


def _needs_gradients(*tensors: Tensor) -> bool:
    import torch

    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    _warn_of_gradients()
    return True


@functools.cache
def _warn_of_gradients() -> None:
    logger.warning("gdn serves inference: calls that need gradients stay with transformers' own functions")


def _pool_of(state: Tensor | None, shape: tuple[int, ...], device: Any) -> Tensor:
    """A pool `[B, HV, V, K]` fp32: the memory of `state` itself where its strides allow, else a copy of it."""
    import torch

    if state is None:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    return state.transpose(-1, -2).to(torch.float32).contiguous()


def _inverse_gates(g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """a and b whose gates with A_log = dt_bias = 0 are g and beta, to fp32 rounding: softplus and sigmoid inverted."""
    import torch

    rate = -g
    return torch.where(rate > 20.0, rate, torch.log(torch.expm1(rate))), torch.logit(beta)


@functools.lru_cache(maxsize=256)
def _packing(sequences: int, steps: int, device: Any) -> tuple[Tensor, Tensor]:
    """Slots 0..B-1, and the offsets of B sequences of `steps` tokens."""
    import torch

    slots = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    return slots[:-1], slots * steps


@functools.lru_cache(maxsize=64)
def _none_known(sequences: int, device: Any) -> Tensor:
    import torch

    return torch.zeros(sequences, dtype=torch.bool, device=device)
