"""GdnConfig: checks, derived sizes, sharding, reading of model configs."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from gdn.config import GdnConfig
from gdn.config import presets
from gdn.errors import ConfigError


def config(**changes):
    return GdnConfig(**{"num_k_heads": 4, "num_v_heads": 8, "head_k_dim": 32, "head_v_dim": 48, **changes})


def test_defaults_are_the_contract():
    made = config()
    assert (made.conv_kernel_size, made.activation_dtype, made.state_dtype) == (4, "bfloat16", "float32")
    assert (made.max_draft_tokens, made.tree_drafts, made.replay_window) == (0, False, 0)
    assert (made.strided_state, made.state_checkpoints, made.deterministic, made.cuda_graph) == (False,) * 4
    assert made.max_slots is None
    assert made.max_tokens is None


def test_derived_sizes():
    made = config()
    assert made.conv_dim == 2 * 4 * 32 + 8 * 48
    assert made.head_ratio == 2
    assert made.state_bytes_per_slot() == 8 * 48 * 32 * 4 + made.conv_dim * 3 * 2


def test_size_of_an_unresolved_state_is_an_error():
    with pytest.raises(ConfigError, match="auto"):
        config(state_dtype="auto").state_bytes_per_slot()


def test_equal_configs_hash_alike_and_are_frozen():
    assert hash(config()) == hash(config())
    with pytest.raises(ValidationError):
        config().num_k_heads = 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_v_heads": 6}, "not a multiple"),
        ({"num_k_heads": 0}, "num_k_heads"),
        ({"head_k_dim": -128}, "head_k_dim"),
        ({"activation_dtype": "float64"}, "activation_dtype"),
        ({"state_dtype": "int8"}, "state_dtype"),
        ({"max_draft_tokens": -1}, "max_draft_tokens"),
        ({"conv_kernel_size": 0}, "conv_kernel_size"),
        ({"tree_drafts": True}, "max_draft_tokens"),
        ({"typo": 1}, "typo"),
    ],
)
def test_nonsense_is_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        config(**changes)


def test_torch_dtypes_are_accepted_by_their_text():
    class Dtype:
        def __repr__(self):
            return "torch.float16"

    assert config(activation_dtype=Dtype()).activation_dtype == "float16"


def test_shard_divides_heads():
    assert config().shard(4).num_k_heads == 1
    assert config().shard(4).num_v_heads == 2


@pytest.mark.parametrize("ranks", [3, 8, 0, -1])
def test_shard_refuses_what_does_not_divide(ranks):
    with pytest.raises(ConfigError, match=f"tp_size={ranks}"):
        config().shard(ranks)


HF = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 3,
}


def test_from_hf_reads_objects_mappings_and_composites():
    expected = {"num_k_heads": 16, "num_v_heads": 48, "head_k_dim": 128, "head_v_dim": 64, "conv_kernel_size": 3}
    sources = (HF, SimpleNamespace(**HF), SimpleNamespace(text_config=SimpleNamespace(**HF)), {"text_config": HF})
    for source in sources:
        made = GdnConfig.from_hf(source)
        assert {name: getattr(made, name) for name in expected} == expected


def test_from_hf_takes_dtype_and_overrides():
    made = GdnConfig.from_hf({**HF, "dtype": "float16", "mamba_ssm_dtype": "bfloat16"}, max_draft_tokens=4)
    assert (made.activation_dtype, made.state_dtype, made.max_draft_tokens) == ("float16", "bfloat16", 4)


def test_from_hf_names_the_missing_field():
    with pytest.raises(ConfigError, match="linear_num_key_heads"):
        GdnConfig.from_hf({"hidden_size": 8})


def test_presets_are_full_configs():
    assert presets()["qwen3-next-80b-a3b"].conv_dim == 8192
    assert all(isinstance(made, GdnConfig) for made in presets().values())
