"""Serve a small, randomly initialised Qwen3-Next model: continuous batching, chunked prefill, speculative decoding.

Drafts come from an n-gram look-up in the request's own text. Prints tokens per second, how many drafts were accepted,
and who serves what, and checks the tokens against transformers' own greedy decoding, one prompt at a time.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from generate import SIZES
from generate import build_model
from rich.console import Console
from rich.table import Table
from serving_model import Request
from serving_model import ServedModel

import gdn

REPETITION = 5.0
"""Embeddings this much louder than a random model's: its text then repeats itself now and then, as real text does."""


@dataclass
class Counts:
    """What a run did."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0


def ngram_drafts(tokens: list[int], count: int, longest: int = 3) -> list[int]:
    """What followed the last tokens where they last stood before; the longest match wins. May be fewer than asked."""
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        tail = tokens[-size:]
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tail:
                return tokens[begin + size : begin + size + count]
    return []


class Server:
    """Requests wait for a slot, are prefilled in chunks, then generate together until each has its tokens.

    Args:
        served: the model.
        drafts: draft tokens per step beside the one that is due; 0: plain decoding.
        chunk: most prompt tokens of one request in one step.
        new_tokens: to generate for each request.
    """

    def __init__(self, served: ServedModel, *, drafts: int, chunk: int, new_tokens: int) -> None:
        self.served = served
        self.drafts = drafts
        self.chunk = chunk
        self.new_tokens = new_tokens
        self.counts = Counts()

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        """Generated tokens of each prompt."""
        requests = [Request(list(prompt), len(prompt)) for prompt in prompts]
        waiting, running = deque(requests), []
        while waiting or running:
            while waiting and self.served.pool.allocator.free:
                request = waiting.popleft()
                request.slot = self.served.pool.acquire()
                running.append(request)
            generating = [request for request in running if request.computed == len(request.tokens) - 1]
            if prefilling := [request for request in running if request not in generating]:
                self._prefill(prefilling)
            if generating:
                self._verify(generating) if self.drafts else self._decode(generating)
            for request in [request for request in running if self._done(request)]:
                self.served.pool.release(request.slot)
                running.remove(request)
        return [request.tokens[request.prompt_length :][: self.new_tokens] for request in requests]

    def _prefill(self, requests: list[Request]) -> None:
        parts = [request.tokens[request.computed :][: self.chunk] for request in requests]
        counts = [len(part) for part in parts]
        following = self.served.forward("extend", self.served.batch(requests, counts), requests, parts).tolist()
        last = -1
        for request, count in zip(requests, counts, strict=True):
            request.computed += count
            last += count
            if request.computed == len(request.tokens):
                request.tokens.append(following[last])

    def _decode(self, requests: list[Request]) -> None:
        parts = [request.tokens[-1:] for request in requests]
        batch = gdn.Batch(slots=self.served.batch(requests, [1] * len(requests)).slots)
        following = self.served.forward("decode", batch, requests, parts).tolist()
        for request, token in zip(requests, following, strict=True):
            request.computed += 1
            request.tokens.append(token)
        self.counts.steps += 1

    def _verify(self, requests: list[Request]) -> None:
        """The token that is due and the drafts after it; those that the model would have chosen itself are taken."""
        width = self.drafts + 1
        guesses = [ngram_drafts(request.tokens, self.drafts) for request in requests]
        parts = [
            [request.tokens[-1], *guess, *[0] * (self.drafts - len(guess))]
            for request, guess in zip(requests, guesses, strict=True)
        ]
        batch = gdn.Batch(slots=self.served.batch(requests, [width] * len(requests)).slots)
        following = self.served.forward("verify", batch, requests, parts).view(-1, width).tolist()
        accepted = []
        for request, guess, chosen in zip(requests, guesses, following, strict=True):
            right = next((n for n, draft in enumerate(guess) if draft != chosen[n]), len(guess))
            accepted.append(right + 1)
            request.tokens += chosen[: right + 1]
            request.computed += right + 1
            self.counts.proposed += len(guess)
            self.counts.accepted += right
        self.served.attention.commit(batch, torch.tensor(accepted, device=self.served.device))
        self.counts.steps += 1

    def _done(self, request: Request) -> bool:
        return len(request.tokens) - request.prompt_length >= self.new_tokens


def timed(server: Server, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Tokens and seconds."""
    start = time.perf_counter()
    tokens = server.run(prompts)
    return tokens, time.perf_counter() - start


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy decoding of one prompt."""
    ids = torch.tensor([prompt], device=model.device)
    made = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return made[0, len(prompt) :].tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="default: the GPU if there is one, else the CPU")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--slots", type=int, default=4, help="requests at a time")
    parser.add_argument("--prompt-length", type=int, default=100, help="longest prompt; they get shorter from there")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=64, help="most prompt tokens of one request in one step")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)

    torch.manual_seed(0)
    device = torch.device(options.device or gdn.detect_device().torch_device)
    model = build_model("qwen3-next").to(device)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(REPETITION)
    lengths = [max(1, options.prompt_length - 17 * index) for index in range(options.requests)]
    prompts = [torch.randint(0, SIZES["vocab_size"], (length,)).tolist() for length in lengths]
    right = [greedy(model, prompt, options.new_tokens) for prompt in prompts]
    longest = options.prompt_length + options.new_tokens + options.drafts + 1
    served = ServedModel(model, slots=options.slots, drafts=options.drafts + 1, max_length=longest)

    console = Console(width=110)
    console.print(f"[bold]{options.requests} requests[/bold] over {options.slots} slots, on {served.triple.device}")
    console.print(f"{served.triple.report.summary()}\n", style="dim")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("", "tokens/s", "steps", "drafts accepted", "tokens"):
        table.add_column(heading, justify="left" if not heading else "right")
    same = True
    for name, drafts in (("greedy", 0), ("n-gram drafts", options.drafts)):
        server = Server(served, drafts=drafts, chunk=options.chunk, new_tokens=options.new_tokens)
        server.run(prompts[:1])
        server.counts = counts = Counts()
        tokens, seconds = timed(server, prompts)
        rate = options.requests * options.new_tokens / seconds
        share = f"{counts.accepted} of {counts.proposed}" if drafts else ""
        table.add_row(name, f"{rate:,.0f}", str(counts.steps), share, "equal" if tokens == right else "DIFFER")
        same = same and tokens == right
    console.print(table)
    console.print(f"\ntokens {'equal those' if same else 'DIFFER from those'} of transformers' greedy decoding")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
