"""transformers' models through gdn: the same logits and tokens as their own path, in every way they are called."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import pytest
import torch

import gdn
from gdn.integrations.transformers import disable
from gdn.integrations.transformers import enable

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
FAMILIES = {
    "qwen3-next": lambda: transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES, **EXPERTS)),
    "qwen3.5": lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES)),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**SIZES, **EXPERTS)),
}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(params=FAMILIES)
def model(request):
    torch.manual_seed(1)
    built = FAMILIES[request.param]().eval()
    yield built
    disable(built)


def both(model, call):
    """Results of `call` on transformers' own path and on gdn's."""
    with torch.no_grad():
        theirs = call()
        enable(model, device="cpu")
        ours = call()
        disable(model)
    return theirs, ours


def tokens(*shape):
    return torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(3))


def assert_close(theirs, ours):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (1, 70), (3, 65)])
def test_prefill(model, shape):
    assert_close(*both(model, lambda: model(tokens(*shape)).logits))


@pytest.mark.parametrize("padded", [1, 5, 69])
def test_case_72_left_padding_reaches_neither_window_nor_state(model, padded):
    ids, mask = tokens(2, 70), torch.ones(2, 70, dtype=torch.long)
    mask[0, :padded] = 0
    theirs, ours = both(model, lambda: model(ids, attention_mask=mask).logits)
    assert_close(theirs[mask.bool()], ours[mask.bool()])
    alone, _ = both(model, lambda: model(ids[:1, padded:], position_ids=torch.arange(70 - padded)[None]).logits)
    with torch.no_grad():
        enable(model, device="cpu")
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded_logits = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(padded_logits[:1, padded:], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("split", [1, 3, 40, 64])
def test_a_prompt_in_two_parts_over_a_cache(model, split):
    ids = tokens(2, 80)

    def parts():
        cache = transformers.DynamicCache(config=model.config)
        first = model(ids[:, :split], past_key_values=cache, use_cache=True).logits
        second = model(ids[:, split:], past_key_values=cache, use_cache=True).logits
        return torch.cat((first, second), dim=1)

    theirs, ours = both(model, parts)
    assert_close(theirs, ours)


def test_cached_decode_equals_one_long_prefill(model):
    ids = tokens(2, 12)

    def steps():
        cache = transformers.DynamicCache(config=model.config)
        logits = [model(ids[:, :5], past_key_values=cache, use_cache=True).logits]
        logits += [model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(5, 12)]
        return torch.cat(logits, dim=1)

    theirs, ours = both(model, steps)
    assert_close(theirs, ours)
    assert_close(both(model, lambda: model(ids).logits)[0], ours)


def test_greedy_generation_gives_the_same_tokens(model):
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    theirs, ours = both(model, lambda: model.generate(ids, **options))
    assert torch.equal(theirs, ours)


def test_beam_search_reorders_the_states(model):
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    theirs, ours = both(model, lambda: model.generate(tokens(1, 7), **options))
    assert torch.equal(theirs, ours)


def test_half_precision(model):
    model.to(torch.bfloat16)
    theirs, ours = both(model, lambda: model(tokens(2, 70)).logits.float())
    assert (theirs - ours).abs().max() < 5e-2 * theirs.abs().max()


def test_the_decode_state_is_updated_where_the_cache_holds_it(model):
    ids = tokens(1, 4)
    enable(model, device="cpu")
    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache, use_cache=True)
        index = next(i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention")
        before = cache.get_recurrent_state(index)
        assert before.transpose(-1, -2).is_contiguous()
        address, values = before.data_ptr(), before.clone()
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    after = cache.get_recurrent_state(index)
    assert after.data_ptr() == address
    assert not torch.equal(after, values)


def test_disable_restores_and_enable_is_per_model(model):
    other = type(model)(model.config).eval()
    layer = next(layer for layer in model.modules() if hasattr(layer, "A_log"))
    untouched = next(layer for layer in other.modules() if hasattr(layer, "A_log"))
    module = sys.modules[type(layer).__module__]
    before = module.torch_chunk_gated_delta_rule
    enable(model, device="cpu")
    assert "forward" in vars(layer)
    assert "forward" not in vars(untouched)
    assert module.torch_chunk_gated_delta_rule is before
    enable(model, device="cpu")
    disable(model)
    assert "forward" not in vars(layer)
    assert layer.forward.__func__ is type(layer).forward
    disable(model)


def test_training_stays_with_transformers(model, caplog):
    from gdn.integrations import transformers as integration

    integration._warn_of_gradients.cache_clear()
    enable(model, device="cpu")
    model(tokens(1, 8)).logits.sum().backward()
    layer = next(layer for layer in model.modules() if hasattr(layer, "A_log"))
    assert layer.conv1d.weight.grad is not None
    assert sum("need gradients" in record.message for record in caplog.records) == 1


def test_the_triple_says_who_serves(model):
    triple = enable(model, device="cpu", require="cpu")
    assert triple.backends["decode"] == "cpu"
    assert triple.config.num_v_heads == 4
    assert triple.state.dtype == "float32"


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(gdn.ConfigError, match="Linear has no Gated DeltaNet layer"):
        enable(torch.nn.Linear(2, 2))


def test_offloaded_weights_are_refused(model):
    layer = next(layer for layer in model.modules() if hasattr(layer, "A_log"))
    layer.conv1d._hf_hook = types.SimpleNamespace()
    with pytest.raises(gdn.ConfigError, match="accelerate"):
        enable(model)


def test_absent_transformers_is_named():
    code = inspect.cleandoc("""
        import sys
        sys.modules["transformers"] = None
        from gdn.integrations.transformers import enable
        try:
            enable(None)
        except ImportError as error:
            assert 'pip install "gdn[hf]"' in str(error), error
        else:
            raise SystemExit("no error")
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
