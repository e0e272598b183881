"""The timed calls by name, `<batch>-h<heads>`; K = V = 128, packed unless one sequence.

States go in and come out in fp32, but for the cases that `_STATES` names.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_kda.cli.cases import BATCHES

HEAD_DIM = 128

# The batches of the published cases come from the package; these are more.
_MORE_BATCHES: dict[str, tuple[int, ...]] = {
    "fixed-65536": (65536,),
    "fixed-131072": (131072,),
    "fixed-1048576": (1048576,),
    "uniform-128x64": (64,) * 128,
    "fixed-1024": (1024,),
    "fixed-128": (128,),
    "crowd-4096x32": (32,) * 4096,
    # Time must follow the tokens here, not the number of sequences or the longest of them.
    "crowd-70000x0-3": tuple(i % 4 for i in range(70000)),
    "contrast-1000x": tuple(32000 if i in (700, 1399) else 32 for i in range(1400)),
}
_STATES = {
    "uniform-128x64": "bf16",
    "crowd-4096x32": "none",
    "crowd-70000x0-3": "none",
}
_STATE_BYTES = {"fp32": 4, "bf16": 2, "none": 0}
_HEADLINE_BATCHES = ("fixed-8192", "mixed-8192", "uniform-8x1024")


@dataclass(frozen=True)
class Case:
    """Lengths of the N sequences, number of heads (H = HV), and how states go in and out."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    states: str = "fp32"  # or "bf16", or "none": no initial and no final state

    @property
    def tokens(self) -> int:
        """T of the packed batch."""
        return sum(self.lengths)

    @property
    def packed(self) -> bool:
        """Whether the call has cu_seqlens."""
        return len(self.lengths) > 1

    @property
    def least_bytes(self) -> int:
        """What any implementation must move: q, k, v, g, out, beta in bf16, and both states."""
        rows = self.tokens * self.heads * (5 * 2 * HEAD_DIM + 2)
        state = HEAD_DIM * HEAD_DIM * _STATE_BYTES[self.states]
        return rows + 2 * len(self.lengths) * self.heads * state


def _case(batch: str, heads: int) -> Case:
    lengths = BATCHES[batch] if batch in BATCHES else _MORE_BATCHES[batch]
    return Case(f"{batch}-h{heads}", tuple(lengths), heads, _STATES.get(batch, "fp32"))


# fmt: off
GROUPS: dict[str, tuple[Case, ...]] = {
    "headline": tuple(_case(batch, heads) for heads in (96, 64) for batch in _HEADLINE_BATCHES),
    "more": tuple(
        _case(batch, heads)
        for batch, heads in (
            ("fixed-8192", 32), ("uniform-128x64", 32), ("fixed-1024", 32), ("fixed-128", 32),
            ("crowd-4096x32", 32), ("fixed-65536", 32), ("fixed-8192", 16), ("fixed-8192", 8),
            ("fixed-65536", 8), ("fixed-8192", 4), ("fixed-131072", 4), ("fixed-1048576", 1),
        )
    ),
    "crowds": tuple(
        _case(batch, heads) for batch, heads in (("contrast-1000x", 32), ("crowd-70000x0-3", 8))
    ),
}
# fmt: on
CASES: dict[str, Case] = {case.name: case for group in GROUPS.values() for case in group}


def select(names: list[str]) -> list[Case]:
    """The cases of these names and groups ("all": every one), largest head counts first.

    By head count, since the Triton baseline tunes itself anew for each.

    Raises:
        ValueError: A name is neither a case nor a group.
    """
    chosen: dict[str, Case] = {}
    for name in names:
        if name == "all":
            chosen |= CASES
        elif name in GROUPS:
            chosen |= {case.name: case for case in GROUPS[name]}
        elif name in CASES:
            chosen[name] = CASES[name]
        else:
            known = ", ".join(["all", *GROUPS, *CASES])
            raise ValueError(f"cases: expected some of {known}; got {name!r}")
    return sorted(chosen.values(), key=lambda case: -case.heads)
