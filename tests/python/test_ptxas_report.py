"""scripts/ptxas_report.py on logs with and without faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/ptxas_report.py"
if not SCRIPT.exists():
    pytest.skip("no scripts beside the tests", allow_module_level=True)

GOOD = """
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90a'
ptxas info    : Function properties for _Z5firstv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 16 barriers
ptxas info    : Compile time = 618.718 ms
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90a'
ptxas info    : Function properties for _Z6helperv
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for _Z6secondv
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, 380 bytes cmem[0]
"""
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are"
    " serialized due to insufficient register resources in the function '_Z5firstv'\n"
)


def report(tmp_path: Path, log: str) -> tuple[int, str]:
    path = tmp_path / "build.log"
    path.write_text(log)
    done = subprocess.run([sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_good_kernels(tmp_path: Path) -> None:
    status, text = report(tmp_path, GOOD)
    assert status == 0
    rows = [line.split() for line in text.splitlines()[1:3]]
    assert rows[0] == ["first", "sm_90a", "96", "0", "0", "0"]
    assert rows[1] == ["second", "sm_90a", "32", "16", "0", "0"]


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (GOOD.replace("16 bytes stack frame, 0", "16 bytes stack frame, 4"), "SPILLS"),
        (GOOD.replace("0 bytes spill loads", "8 bytes spill loads", 1), "SPILLS"),
        (GOOD + SERIALIZED, "C7510"),
        (GOOD + "ptxas info : setmaxnreg ignored to maintain minimum registers\n", "setmaxnreg"),
        (GOOD.partition("ptxas info    : Used 32")[0], "?"),
        ("nothing of ptxas", "no kernel"),
    ],
    ids=["stores", "loads", "serialized", "setmaxnreg", "cut short", "empty"],
)  # fmt: skip
def test_faults(tmp_path: Path, log: str, says: str) -> None:
    status, text = report(tmp_path, log)
    assert status == 1
    assert says in text
    assert "NOT fit" in text
