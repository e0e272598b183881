"""Writes tensors of one's own to a file that `flash-kda run --input` takes.

Needs torch and safetensors. Prints the command to run next.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file

LENGTHS, HEADS, DIM = (200, 56), 4, 128


def main() -> None:
    """Writes to the file named on the command line, own_tensors.safetensors if none is."""
    path = sys.argv[1] if len(sys.argv) > 1 else "own_tensors.safetensors"
    torch.manual_seed(0)
    total = sum(LENGTHS)

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16)

    tensors = {
        "q": bf16(1, total, HEADS, DIM),
        "k": bf16(1, total, HEADS, DIM),
        "v": bf16(1, total, HEADS, DIM),
        "g": bf16(1, total, HEADS, DIM),  # raw gate
        "beta": bf16(1, total, HEADS),  # logits
        "A_log": torch.linspace(0, 0.5, HEADS),
        "dt_bias": torch.zeros(HEADS, DIM),
        "cu_seqlens": torch.tensor([0, LENGTHS[0], total]),
    }
    save_file(tensors, path)
    print(f"flash-kda run --input {path} --output results.safetensors --plot error.png")


if __name__ == "__main__":
    main()
