"""Generate with a small, randomly initialised Qwen3-Next-shaped model: transformers' own path, then gdn's.

Prints who serves what, tokens per second both ways, and checks that both give the same tokens. The weights are random,
so the text means nothing; the layers are those of the real models.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

import gdn
from gdn.integrations.transformers import disable
from gdn.integrations.transformers import enable

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest difference of logits, relative to the largest logit."""
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}


def build_model(name: str) -> torch.nn.Module:
    """A model of the named family with random weights."""
    import transformers

    match name:
        case "qwen3-next":
            model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES, **EXPERTS))
        case "qwen3.5":
            model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES))
        case _:
            model = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**SIZES, **EXPERTS))
    return model.eval()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure(
    model: torch.nn.Module, prompt: torch.Tensor, new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Tokens, logits of the prompt, seconds of the prefill, seconds of one decode step."""
    model.generate(prompt[:, :16], max_new_tokens=2, do_sample=False)
    synchronise(prompt.device)
    start = time.perf_counter()
    logits = model(prompt).logits
    synchronise(prompt.device)
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    synchronise(prompt.device)
    decode = (time.perf_counter() - start - prefill) / (new_tokens - 1)
    return tokens, logits, prefill, decode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen3-next", "qwen3.5", "qwen3.5-moe"), default="qwen3-next")
    parser.add_argument("--device", default=None, help="default: the GPU if there is one, else the CPU")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    console = Console(width=110)
    logging.getLogger("transformers").setLevel(logging.ERROR)

    torch.manual_seed(0)
    device = torch.device(options.device or gdn.detect_device().torch_device)
    model = build_model(options.model).to(device, getattr(torch, options.dtype))
    prompt = torch.randint(0, SIZES["vocab_size"], (options.batch, options.prompt_length), device=device)

    theirs = measure(model, prompt, options.new_tokens)
    triple = enable(model)
    ours = measure(model, prompt, options.new_tokens)
    disable(model)

    console.print(f"[bold]{options.model}[/bold], random weights, {options.dtype}, on {triple.device}")
    console.print(f"{triple.report.summary()}\n", style="dim")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("", "prefill tokens/s", "decode tokens/s"):
        table.add_column(heading, justify="left" if not heading else "right")
    rates = []
    for name, (_, _, prefill, decode) in (("transformers", theirs), ("gdn", ours)):
        rates.append((prompt.numel() / prefill, options.batch / decode))
        table.add_row(name, *(f"{rate:,.0f}" for rate in rates[-1]))
    table.add_row("ratio", *(f"{new / old:.2f}x" for old, new in zip(*rates, strict=True)))
    console.print(table)

    error = ((theirs[1] - ours[1]).abs().max() / theirs[1].abs().max()).item()
    same = torch.equal(theirs[0], ours[0])
    allowed = TOLERANCE[options.dtype]
    console.print(
        f"\ngreedy tokens {'equal' if same else 'DIFFER'}; logits differ by {error:.1e} (allowed {allowed:.0e})"
    )
    return 0 if error <= allowed and (same or options.dtype != "float32") else 1


if __name__ == "__main__":
    sys.exit(main())
