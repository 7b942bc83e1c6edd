"""Write a pair of models with published shapes and made-up weights, for an engine without a hub.

    python -m benchmarks.stand_in qwen2.5-coder-1.5b+0.5b FOLDER --device cuda

FOLDER gets an ordinary Hugging Face folder per model (without a tokenizer).  A pass takes as
long as with the trained weights.  Every token is followed by itself, by a wide margin: with a head
equal to the embedding and layers that add almost nothing, no near-tie of bfloat16 can change a
text, so acceptance can be dictated along it (`profiler.engines.drafts.Forced`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from profiler.models.architectures import PAIRS, DecoderShape

SMALL = 1e-3
"""Factor on the outputs of attention and MLP."""


def write(shape: DecoderShape, folder: Path, device: str) -> None:
    """Write the model as bfloat16."""
    torch.manual_seed(0)
    model = shape.build(torch.device(device), torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(SMALL)
            layer.mlp.down_proj.weight.mul_(SMALL)
    model.save_pretrained(folder)


def main() -> None:
    """Write both models of the pair that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", choices=[name for name, pair in PAIRS.items() if pair.draft])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    pair = PAIRS[asked.pair]
    assert pair.draft is not None
    for shape in (pair.target, pair.draft):
        write(shape, asked.out / shape.name, asked.device)
        print(f"{asked.out / shape.name}: {shape.parameters / 1e9:.2f} billion weights", flush=True)


if __name__ == "__main__":
    main()
