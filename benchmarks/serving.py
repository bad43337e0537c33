"""Host time of the serving layer per layer and step.

`python` is the layer with operations that do nothing: its own cost, on any machine; the budget is 25 us. `served` is
the layer with its operations, `bare` the same operations called by hand. On a GPU the host runs ahead of the device, so
both hold Python and launches alone; on a CPU they hold the operations' work, and their difference is within its noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

import gdn
from gdn.serving.operations import head_views

BUDGET_US = 25.0
ROUNDS = 15


def host_us(functions: dict[str, Callable[[], object]], calls: int, device: torch.device) -> dict[str, float]:
    """Median host time of one call of each, measured in turns so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(ROUNDS + 1):
        for name, function in functions.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if turn:
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


class Bench:
    """One pool, its layers, and each kind of step as the serving layer runs it and as bare operations."""

    def __init__(self, config: gdn.GdnConfig, device: str, requests: int, layers: int, layout: str) -> None:
        self.triple = gdn.resolve(config, device=device)
        self.requests, self.drafts = requests, config.max_draft_tokens
        self.pool = gdn.StatePool(
            config, requests + 1, device, num_layers=layers, max_requests=requests, layout=layout,
            contract=self.triple.state,
        )  # fmt: skip
        self.attention = gdn.GdnAttention(self.triple, self.pool)
        dtype = getattr(torch, config.activation_dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=dtype)

        self.layers = [
            gdn.LayerParams(
                conv_weight=normal(config.conv_dim, config.conv_kernel_size), A_log=normal(config.num_v_heads).float(),
                dt_bias=normal(config.num_v_heads).float(), layer_id=index,
            )
            for index in range(layers)
        ]  # fmt: skip
        self.slots = torch.arange(requests, dtype=torch.int32, device=device)
        tokens = requests * max(self.drafts, 1)
        self.x, self.a, self.b = normal(tokens, config.conv_dim), *normal(2, tokens, config.num_v_heads)
        self.heads = config.num_k_heads, config.head_k_dim, config.head_v_dim

    def without_work(self) -> gdn.GdnAttention:
        """The serving layer over operations that return at once."""
        rows = self.requests
        conv_one, conv_all = self.x[:rows], torch.empty_like(self.x.view(rows, -1, self.x.shape[1]).transpose(1, 2))
        result = gdn.ExtendResult(conv_one)
        functions = {
            "conv_update": lambda **arguments: conv_one if arguments["x"].dim() == 2 else conv_all,
            "decode": lambda *args, **arguments: conv_one,
            "verify": lambda *args, **arguments: conv_one,
            "conv_extend": lambda **arguments: arguments["x"],
            "qkv_split": lambda mixed: (mixed, mixed, mixed),
            "gating": lambda *args: (conv_one, conv_one),
            "extend": lambda *args, **arguments: result,
        }
        if self.triple.packed_decode is not None:
            functions["packed_decode"] = functions["decode"]
        return gdn.GdnAttention(replace(self.triple, **functions), self.pool)

    def decode(self, attention: gdn.GdnAttention) -> Callable[[], object]:
        batch, rows = gdn.Batch(slots=self.slots), self.requests
        x, a, b = self.x[:rows], self.a[:rows], self.b[:rows]

        def step() -> None:
            for layer in self.layers:
                attention.forward_decode(layer, batch, x, a, b)

        return step

    def bare_decode(self) -> Callable[[], object]:
        triple, slots, rows = self.triple, self.slots, self.requests
        x, a, b = self.x[:rows], self.a[:rows], self.b[:rows]
        pairs = [(layer, self.pool.layer(layer.layer_id)) for layer in self.layers]

        def step() -> None:
            for layer, state in pairs:
                mixed = triple.conv_update(
                    x, state.conv, layer.conv_weight, layer.bias, activation="silu", conv_state_indices=slots
                )  # fmt: skip
                gates = {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
                if triple.packed_decode is not None:
                    triple.packed_decode(mixed, a, b, **gates, ssm_states=state.recurrent, cache_indices=slots)
                else:
                    q, k, v = head_views(mixed, *self.heads)
                    triple.decode(q, k, v, a, b, **gates, ssm_states=state.recurrent, cache_indices=slots)

        return step

    def extend(self, attention: gdn.GdnAttention) -> Callable[[], object]:
        """A step whose requests bring D tokens each; the last is fresh and the first takes a snapshot."""
        count, device = self.requests, self.slots.device
        none = torch.full_like(self.slots, -1)
        slots, lengths = none.clone(), none.clone()
        slots[0], lengths[0] = count, 0
        batch = gdn.Batch(
            slots=self.slots,
            query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=device) * max(self.drafts, 1),
            has_initial_state=torch.arange(count, device=device) < count - 1,
            snapshot_slots=slots,
            snapshot_lengths=lengths,
        )

        def step() -> None:
            for layer in self.layers:
                attention.forward_extend(layer, batch, self.x, self.a, self.b)

        return step

    def verify(self, attention: gdn.GdnAttention) -> Callable[[], object]:
        batch = gdn.Batch(slots=self.slots)

        def step() -> None:
            for layer in self.layers:
                attention.forward_verify(layer, batch, self.x, self.a, self.b)

        return step

    def bare_verify(self) -> Callable[[], object]:
        triple, slots, drafts = self.triple, self.slots, self.drafts
        table = self.pool.require_drafts().tables[drafts]
        x = self.x.view(self.requests, drafts, -1).transpose(1, 2)
        pairs = [(layer, self.pool.layer(layer.layer_id)) for layer in self.layers]

        def step() -> None:
            for layer, state in pairs:
                mixed = triple.conv_update(
                    x, state.conv, layer.conv_weight, layer.bias, activation="silu", conv_state_indices=slots,
                    intermediate_conv_window=state.windows, intermediate_state_indices=slots,
                    retrieve_next_token=table.next_token, retrieve_next_sibling=table.next_sibling,
                )  # fmt: skip
                q, k, v = head_views(mixed.transpose(1, 2).flatten(0, 1), *self.heads)
                triple.verify(
                    layer.A_log, layer.dt_bias, q, k, v, self.a, self.b, ssm_states=state.recurrent,
                    cache_indices=slots, query_start_loc=table.offsets, intermediate_states_buffer=state.steps,
                    intermediate_state_indices=slots, cache_steps=drafts,
                )  # fmt: skip

        return step

    def commit(self) -> Callable[[], object]:
        batch = gdn.Batch(slots=self.slots)
        accepted = torch.full_like(self.slots, self.drafts)
        return lambda: self.attention.commit(batch, accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="default: the GPU if there is one, else the CPU")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--layers", type=int, default=None, help="default: 36 on a GPU, else 4")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--layout", choices=("slot_major", "page_major"), default="slot_major")
    parser.add_argument("--small", action="store_true", help="tiny heads: the operations' own time nearly vanishes")
    options = parser.parse_args()

    device = torch.device(options.device or gdn.detect_device().torch_device)
    layers = options.layers or (36 if device.type == "cuda" else 4)
    config = gdn.presets()["qwen3-next-80b-a3b"].shard(4)
    heads = {"num_k_heads": 1, "num_v_heads": 1, "head_k_dim": 16, "head_v_dim": 16} if options.small else {}
    needs = {
        "state_checkpoints": True,
        "max_draft_tokens": options.drafts,
        "strided_state": options.layout == "page_major",
    }
    config = config.model_copy(update={**heads, **needs})
    bench = Bench(config, str(device), options.requests, layers, options.layout)
    print(bench.triple.report.summary())
    print(f"{options.requests} requests, {layers} layers, {options.layout}, host us per layer")
    calls = 5 if device.type == "cpu" else 20
    idle = bench.without_work()
    steps = {
        "decode": {
            "python": bench.decode(idle), "served": bench.decode(bench.attention), "bare": bench.bare_decode()
        },
        "verify": {
            "python": bench.verify(idle), "served": bench.verify(bench.attention), "bare": bench.bare_verify()
        },
        "extend": {"python": bench.extend(idle), "served": bench.extend(bench.attention)},
    }  # fmt: skip
    for name, functions in steps.items():
        times = {column: us / layers for column, us in host_us(functions, calls, device).items()}
        print(f"{name:8}", "   ".join(f"{column} {us:8.1f}" for column, us in times.items()), f"  budget {BUDGET_US}")
    commit = host_us({"commit": bench.commit()}, calls, device)["commit"]
    print(f"commit   {commit:8.1f} us a step, all layers")


if __name__ == "__main__":
    main()
