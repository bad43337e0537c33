"""What GdnAttention asks of its triple and its pool, and backends that can't reach slots apart in memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gdn
from gdn.serving import operations
from gdn.testing.serving import Scenario
from gdn.testing.serving import stage as stages
from gdn.types import StateContract
from tests.serving.devices import DEVICES
from tests.serving.stages import CONFIG
from tests.serving.stages import make_stage
from tests.serving.stages import prefill

POOL_ARGUMENTS = ("conv_state", "conv_states", "ssm_states", "replayssm_d", "replayssm_k", "replayssm_g")


def dense_only(triple):
    """The triple as backends without `strided_state` would serve it: they fail on slots that are apart."""

    def refusing(function):
        def operation(*args, **arguments):
            for name in POOL_ARGUMENTS:
                if name in arguments:
                    assert arguments[name].is_contiguous(), name
            return function(*args, **arguments)

        return operation

    stateful = {name: f for name, f in triple.operations().items() if name not in ("gating", "qkv_split")}
    return dataclasses.replace(triple, **{name: refusing(function) for name, function in stateful.items()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("replay", [0, 4])
def test_page_major_pools_on_backends_that_take_only_dense_slots(replay, device, monkeypatch):
    resolve, chosen_row = stages.resolve, operations.chosen_row
    monkeypatch.setattr(stages, "resolve", lambda *args, **options: dense_only(resolve(*args, **options)))
    config = CONFIG.model_copy(update={"replay_window": replay})
    with pytest.raises(AssertionError, match="conv_state"):
        Scenario(config, device, layout="page_major").run(40)
    Scenario(config, device, layout="slot_major").run(40)
    dense_row = lambda *args: chosen_row(*args).model_copy(update={"strided_state": False})  # noqa: E731
    monkeypatch.setattr(operations, "chosen_row", dense_row)
    scenario = Scenario(config, device, layout="page_major")
    scenario.run(300)
    assert scenario.done["extend snapshots"] >= 10
    assert scenario.done["chain"] >= 10


@pytest.mark.parametrize("replay", [0, 4])
def test_operations_are_called_with_values_that_make_sense(replay, monkeypatch):
    resolve = stages.resolve
    monkeypatch.setattr(stages, "resolve", lambda *args, **options: resolve(*args, **options).checked())
    scenario = Scenario(CONFIG.model_copy(update={"replay_window": replay}), "cpu")
    scenario.padding = (-1,)
    scenario.run(150)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_without_snapshots_that_names_the_request_itself(device, monkeypatch):
    chosen_row = operations.chosen_row
    dense_row = lambda *args: chosen_row(*args).model_copy(update={"strided_state": False})  # noqa: E731
    monkeypatch.setattr(operations, "chosen_row", dense_row)
    stage = make_stage(device, layout="page_major")
    inputs = stage.inputs(70)
    batch = gdn.Batch(
        slots=stage.tensor([2]),
        query_start_loc=stage.tensor([0, 70]),
        has_initial_state=stage.tensor([False], torch.bool),
        snapshot_slots=stage.tensor([2]),
        snapshot_lengths=stage.tensor([-1]),
    )
    stage.forward("extend", batch, [inputs])
    stage.assert_holds(2, stage.fresh().after(inputs)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["bfloat16", "float16"])
def test_16_bit_activations(activation, device):
    Scenario(CONFIG.model_copy(update={"activation_dtype": activation}), device).run(150)


@pytest.mark.parametrize("device", DEVICES)
def test_windows_of_another_dtype_than_the_activations(device):
    stage = make_stage(device, activation_dtype="bfloat16")
    triple = stage.attention.triple
    stage.pool = gdn.StatePool(
        stage.config, 6, stage.device, num_layers=2, max_requests=2, contract=triple.state, conv_dtype=torch.float32
    )
    stage.attention = gdn.GdnAttention(triple, stage.pool)
    truths = prefill(stage, {1: 70, 4: 2})
    truths |= prefill(stage, {4: 1, 1: 3}, truths)
    batch, drafts = gdn.Batch(slots=stage.tensor([4, 1])), [stage.inputs(3), stage.inputs(3)]
    stage.forward("verify", batch, drafts)
    stage.attention.commit(batch, stage.tensor([2, 3]))
    assert stage.pool.layer(0).windows.dtype == torch.float32
    stage.assert_holds(4, truths[4].after(drafts[0].rows(slice(2)))[0])
    stage.assert_holds(1, truths[1].after(drafts[1])[0])


@pytest.mark.parametrize("width", [1, 2, 8])
def test_other_conv_widths(width):
    config = CONFIG.model_copy(update={"conv_kernel_size": width})
    scenario = Scenario(config, "cpu", layers=1)
    scenario.run(150)
    assert scenario.done["tree"] >= 10


def test_a_conv_weight_as_a_module_holds_it():
    stage = make_stage()
    layer = stage.parameters[0]
    module = torch.nn.Conv1d(CONFIG.conv_dim, CONFIG.conv_dim, 4, groups=CONFIG.conv_dim, bias=False)
    params = gdn.LayerParams(conv_weight=module.weight.detach(), A_log=layer.A_log, dt_bias=layer.dt_bias)
    assert params.conv_weight.shape == (CONFIG.conv_dim, 4)
    assert params.conv_weight.data_ptr() == module.weight.data_ptr()


def test_a_negative_layer_is_refused():
    layer = make_stage().parameters[0]
    with pytest.raises(gdn.InputError, match="layer_id"):
        gdn.LayerParams(conv_weight=layer.conv_weight, A_log=layer.A_log, dt_bias=layer.dt_bias, layer_id=-1)


def test_parameters_updated_in_place_are_seen():
    stage = make_stage()
    prefill(stage, {1: 5})
    stage.weights.A_log.add_(0.5)
    stage.weights.conv.mul_(0.5)
    prefill(stage, {1: 5})


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"num_v_heads": 4}, {}, "expected num_v_heads=2, as the triple was resolved for, got 4"),
        ({"conv_kernel_size": 3}, {}, "expected conv_kernel_size=4"),
        ({"replay_window": 4}, {}, "expected replay_window=0"),
        ({"state_dtype": "bfloat16"}, {}, "expected float32/vk states, got bfloat16/vk"),
        ({}, {"device": "meta"}, "expected device cpu, got meta"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(config, options, message):
    triple = gdn.resolve(CONFIG, device="cpu")
    pool = gdn.StatePool(CONFIG.model_copy(update=config), 3, **{"device": "cpu", **options})
    with pytest.raises(gdn.ConfigError, match=message):
        gdn.GdnAttention(triple, pool)


@pytest.mark.parametrize(
    ("needs", "message"),
    [({"reserved_slots": 1}, "1 reserved slots, got 0"), ({"alignment": 4096}, "aligned to 4096 bytes")],
)
def test_a_state_contract_that_the_pool_does_not_keep_is_refused(needs, message):
    contract = StateContract(dtype="float32", **needs)
    triple = dataclasses.replace(gdn.resolve(CONFIG, device="cpu"), state=contract)
    with pytest.raises(gdn.ConfigError, match=f"{message}.*contract=triple.state"):
        gdn.GdnAttention(triple, gdn.StatePool(CONFIG, 3, "cpu"))
    gdn.GdnAttention(triple, gdn.StatePool(CONFIG, 3, "cpu", contract=contract))


def test_an_operation_that_nobody_serves_is_named():
    triple = dataclasses.replace(gdn.resolve(CONFIG, device="cpu"), conv_update=None)
    with pytest.raises(gdn.ConfigError, match="no backend of this triple serves conv_update"):
        gdn.GdnAttention(triple, gdn.StatePool(CONFIG, 3, "cpu"))
