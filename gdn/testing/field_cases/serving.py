"""Serving: what kind of step a row is, padding of captured batches, order of snapshots, and a random server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gdn.errors import NoBackendError
from gdn.serving.batch import Batch
from gdn.testing.harness import Harness
from gdn.testing.serving.scenario import Scenario
from gdn.testing.serving.stage import Stage
from gdn.testing.serving.truth import Truth
from gdn.types import CORE_OPERATIONS
from gdn.types import ROW_OPERATION


class ServingCases(Harness):
    """The backend under test serves what it can, others the rest of the triple."""

    @pytest.mark.parametrize("layout", ["slot_major", "page_major"])
    def test_a_random_server(self, layout: Any) -> None:
        self._stage(Scenario, layout=layout).run(60)

    @pytest.mark.parametrize("length", [1, 4])
    def test_case_07_a_fresh_prompt_as_long_as_a_decode_or_a_verify_is_a_prefill(self, length: int) -> None:
        """The kind of a row was guessed from its length, so an uninitialised slot was continued."""
        stage = self._stage()
        stage.poison(2)
        self._prefill(stage, {2: (None, length)})

    def test_case_07_prompts_drafts_and_single_tokens_in_one_step(self) -> None:
        """One batch: a fresh one-token prompt, a decode, the last token of a longer prompt, and a verify."""
        stage = self._stage()
        for slot in range(4):
            stage.poison(slot)
        truths = self._prefill(stage, {1: (None, 70), 2: (None, 3), 3: (None, 5)})
        drafts, batch = stage.inputs(4), Batch(slots=stage.tensor([3]))
        got = stage.forward("verify", batch, [drafts])
        self._prefill(stage, {0: (None, 1), 1: (truths[1], 1), 2: (truths[2], 1)})
        after, right = truths[3].after(drafts)
        stage.assert_close(got, right, "drafts")
        stage.attention.commit(batch, stage.tensor([4]))
        stage.assert_holds(3, after)

    def test_case_30_a_captured_batch_is_padded_by_requests(self) -> None:
        """Arrays with one row for each request were cut to the number of tokens in graph replay."""
        stage = self._stage(layers=2, slots=8, features=self._graphs())
        truths = self._prefill(stage, {slot: (None, slot + 1) for slot in range(7)})
        batch = Batch(
            slots=stage.tensor([-1] * 8), positions=stage.tensor([0] * 8), snapshot_slots=stage.tensor([-1] * 8),
            snapshot_interval=64,
        )  # fmt: skip
        accepted, inputs = stage.tensor([0] * 8), stage.inputs(32)
        parts = [inputs.of_layer(index, stage.device) for index in range(2)]

        def step() -> list[Any]:
            outputs = [
                stage.attention.forward_verify(layer, batch, *part)
                for layer, part in zip(stage.parameters, parts, strict=True)
            ]
            stage.attention.commit(batch, accepted)
            return outputs

        replay = _captured(stage, step)
        for slots, lengths in (([4, 0, 6, 2, 5], [4, 4, 0, 1, 2]), ([3, 0, 1], [1, 4, 2])):
            batch.refresh(slots=slots, positions=[5] * len(slots))
            accepted.zero_()
            accepted[: len(slots)] = stage.tensor(lengths)
            untouched = {slot: _bits(stage, slot) for slot in range(8) if slot not in slots}
            outputs = torch.stack([output[0] for output in replay()]).cpu().unflatten(1, (8, 4))
            for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                drafts = inputs.rows(slice(4 * row, 4 * row + 4))
                stage.assert_close(outputs[:, row], truths[slot].after(drafts)[1], f"drafts of row {row}")
                truths[slot] = truths[slot].after(drafts.rows(slice(length)))[0]
                stage.assert_holds(slot, truths[slot])
            assert not outputs[:, len(slots) :].any()
            assert all(torch.equal(_bits(stage, slot), bits) for slot, bits in untouched.items())

    @pytest.mark.parametrize("padding", [-1, 4])
    def test_case_33_padding_touches_no_parked_request(self, padding: int) -> None:
        """Padded rows reused stale indices and wrote into parked requests; every slot can be a real request's."""
        stage = self._stage(layers=2, slots=4, features=self._graphs())
        self._prefill(stage, {0: (None, 5), 1: (None, 66)})
        parked = _bits(stage, 1)
        batch = Batch(slots=stage.tensor([0, padding, padding, padding]))
        inputs = [stage.inputs(1) for _ in range(4)]
        parts = [part.of_layer(0, stage.device) for part in inputs]
        packed = [torch.cat(rows) for rows in zip(*parts, strict=True)]

        def step() -> list[Any]:
            return [stage.attention.forward_decode(layer, batch, *packed) for layer in stage.parameters]

        replay = _captured(stage, step)
        for _ in range(100):
            outputs = replay()
        assert bool(outputs[0][0, 0].any())
        assert not outputs[0][0, 1:].any()
        assert torch.equal(_bits(stage, 1), parked)
        assert {stage.pool.acquire() for _ in range(4)} == {0, 1, 2, 3}

    @pytest.mark.parametrize("repeat", range(3))
    def test_case_67_a_snapshot_comes_after_the_forward_that_writes_it(self, repeat: int) -> None:
        """A copy on another stream ran before the extend that it should have followed."""
        stage = self._stage(seed=repeat)
        stage.poison(1)
        inputs, truth = stage.inputs(200), stage.fresh()
        batch = Batch(
            slots=stage.tensor([1]),
            query_start_loc=stage.tensor([0, 200]),
            has_initial_state=stage.tensor([False], torch.bool),
        )
        truth, _ = truth.after(inputs)
        if stage.device.startswith("cuda"):
            writer, copier = torch.cuda.Stream(stage.device), torch.cuda.Stream(stage.device)
            parts = [inputs.of_layer(index, stage.device) for index in range(stage.layers)]
            writer.wait_stream(torch.cuda.current_stream(stage.device))
            with torch.cuda.stream(writer):
                torch.cuda._sleep(50_000_000)
                for layer, part in zip(stage.parameters, parts, strict=True):
                    stage.attention.forward_extend(layer, batch, *part)
                written = writer.record_event()
            with torch.cuda.stream(copier):
                copier.wait_event(written)
                stage.pool.copy(stage.tensor([1]), stage.tensor([3]))
            torch.cuda.synchronize(stage.device)
        else:
            stage.forward("extend", batch, [inputs])
            stage.pool.copy(1, 3)
        stage.assert_holds(3, truth)

    @pytest.mark.parametrize("length", [0, 5])
    def test_case_67_a_snapshot_of_nothing_is_zero(self, length: int) -> None:
        """A prefix of no tokens was stored as whatever the slot held."""
        stage = self._stage()
        stage.poison(1)
        stage.poison(3)
        batch = Batch(
            slots=stage.tensor([1]),
            query_start_loc=stage.tensor([0, length]),
            has_initial_state=stage.tensor([False], torch.bool),
            snapshot_slots=stage.tensor([3]),
            snapshot_lengths=stage.tensor([0]),
        )
        stage.forward("extend", batch, [stage.inputs(length)])
        stage.assert_holds(3, stage.fresh())

    def _stage(
        self, kind: type[Any] = Stage, *, layout: Any = "slot_major", features: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """A stage, or a scenario, on which the backend serves at least one of decode, extend and verify."""
        operations = [op for op in CORE_OPERATIONS if op in self.declared()]
        if not operations:
            pytest.skip(f"{self.backend} declares none of {', '.join(CORE_OPERATIONS)}")
        geometry = self.geometry(*operations, HK=1, HV=2, state="float32")
        features = {"max_draft_tokens": 4, "strided_state": layout == "page_major", **(features or {})}
        try:
            config = geometry.config(**features)
            stage = kind(config, self.device_info(), layout=layout, prefer=self.backend, **options)
        except NoBackendError as error:
            pytest.skip(f"nobody serves {features} with {geometry}: {error}")
        chosen = stage.attention.triple.backends
        if self.backend not in (chosen[ROW_OPERATION[op]] for op in CORE_OPERATIONS):
            pytest.skip(f"{self.backend} serves none of {', '.join(CORE_OPERATIONS)} for {features}")
        return stage

    def _graphs(self) -> dict[str, Any]:
        """Ask for operations that can be captured where there is a GPU to capture on."""
        return {"cuda_graph": self.torch_device().startswith("cuda")}

    def _prefill(self, stage: Stage, rows: dict[int, tuple[Truth | None, int]]) -> dict[int, Truth]:
        """Extend by slot a request (None: a fresh one) by so many tokens; check everything."""
        lengths = [length for _, length in rows.values()]
        inputs = [stage.inputs(length) for length in lengths]
        batch = Batch(
            slots=stage.tensor(list(rows)),
            query_start_loc=stage.tensor([sum(lengths[:row]) for row in range(len(lengths) + 1)]),
            has_initial_state=stage.tensor([truth is not None for truth, _ in rows.values()], torch.bool),
        )
        got, after = stage.forward("extend", batch, inputs), {}
        for part, (slot, (truth, length)) in zip(inputs, rows.items(), strict=True):
            after[slot], right = (truth or stage.fresh()).after(part)
            stage.assert_close(got[:, :length], right, f"outputs of slot {slot}")
            stage.assert_holds(slot, after[slot])
            got = got[:, length:]
        return after


def _captured(stage: Stage, step: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """The step as a CUDA graph where its operations may be captured, else itself. Warm it up on padding alone."""
    if not (stage.device.startswith("cuda") and stage.config.cuda_graph):
        return step
    step()
    torch.cuda.synchronize(stage.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def replay() -> list[Any]:
        graph.replay()
        torch.cuda.synchronize(stage.device)
        return outputs

    return replay


def _bits(stage: Stage, slot: int) -> Any:
    """Everything that a slot holds, as bytes."""
    parts = (stage.pool.conv[:, slot], stage.pool.recurrent[:, slot])
    return torch.cat([part.cpu().contiguous().flatten().view(torch.uint8) for part in parts])
