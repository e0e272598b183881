"""Reads a log of `nvcc -Xptxas -v`: a table of the kernels, and whether they are fit to ship.

    python scripts/ptxas_report.py build.log

Exit status 1: a kernel spills registers, ptxas serialized wgmma or ignored setmaxnreg, or the log
holds no kernel at all.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

# What ptxas says when it gives up what the kernels are built on (C7510 to C7518 and their like).
_LOSSES = re.compile(r"C75\d\d|Potential Performance Loss|wgmma.*serializ|setmaxnreg.*ignored")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass
class Kernel:
    """What ptxas said of one kernel; bytes a thread, None where it said nothing."""

    name: str
    architecture: str
    stack: int | None = None
    stores: int | None = None
    loads: int | None = None
    registers: int | None = None

    @property
    def good(self) -> bool:
        """Reported in full, and no spills."""
        return self.registers is not None and self.stores == 0 and self.loads == 0


def read(lines: Iterable[str]) -> tuple[list[Kernel], list[str]]:
    """The kernels in the order of the log, and the warnings that count."""
    kernels: list[Kernel] = []
    losses: list[str] = []
    ours = False  # what follows is about the last kernel, not about a function it calls
    for line in lines:
        if _LOSSES.search(line):
            losses.append(line.strip())
        if entry := _ENTRY.search(line):
            kernels.append(Kernel(entry[1], entry[2]))
        elif "Function properties for" in line:
            ours = bool(kernels) and line.split()[-1] == kernels[-1].name
        elif (spills := _SPILLS.search(line)) and kernels and ours:
            kernels[-1].stack, kernels[-1].stores, kernels[-1].loads = map(int, spills.groups())
        elif (used := _USED.search(line)) and kernels:
            kernels[-1].registers = int(used[1])
    return kernels, list(dict.fromkeys(losses))


def demangle(names: list[str]) -> list[str]:
    """Readable names, where c++filt is at hand."""
    try:
        done = subprocess.run(
            ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return names
    plain = done.stdout.replace("(anonymous namespace)::", "").splitlines()
    return [re.sub(r"\(.*|flash_kda::|sm90::|void ", "", line) for line in plain]


def main() -> int:
    """Prints the table; returns the exit status."""
    if len(sys.argv) != 2:
        print("usage: ptxas_report.py build.log", file=sys.stderr)
        return 2
    kernels, losses = read(pathlib.Path(sys.argv[1]).read_text(errors="replace").splitlines())
    columns = ("registers", "stack", "spill stores", "spill loads")
    print(f"{'kernel':<44}{'for':<9}" + "".join(f"{c:>14}" for c in columns))
    for kernel, name in zip(kernels, demangle([k.name for k in kernels]), strict=True):
        figures = (kernel.registers, kernel.stack, kernel.stores, kernel.loads)
        cells = "".join(f"{'?' if f is None else f:>14}" for f in figures)
        print(f"{name:<44}{kernel.architecture:<9}{cells}{'' if kernel.good else '  SPILLS'}")
    for loss in losses:
        print(f"ptxas: {loss}")
    if not kernels:
        print("no kernel was compiled")
    good = bool(kernels) and all(kernel.good for kernel in kernels) and not losses
    print("the CUDA kernels are fit to ship" if good else "the CUDA kernels are NOT fit to ship")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
