"""The published benchmark cases: three batches of 8192 tokens, each with 96 and with 64 heads."""

from __future__ import annotations

from dataclasses import dataclass

# Lengths of the sequences of each batch.
BATCHES: dict[str, tuple[int, ...]] = {
    "fixed-8192": (8192,),
    "mixed-8192": (1300, 547, 2048, 963, 271, 3063),
    "uniform-8x1024": (1024,) * 8,
}
HEADS = (96, 64)
DEFAULT_CASE = "mixed-8192-h96"


@dataclass(frozen=True)
class Case:
    """Sizes of a call: lengths of the N sequences, H key and HV value heads, head sizes K and V."""

    name: str
    seq_lens: tuple[int, ...]
    heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def tokens(self) -> int:
        """T: tokens of the packed batch."""
        return sum(self.seq_lens)


CASES: dict[str, Case] = {
    f"{batch}-h{heads}": Case(f"{batch}-h{heads}", seq_lens, heads, heads)
    for batch, seq_lens in BATCHES.items()
    for heads in HEADS
}
