"""Checks what a finished wheel holds and asks of a machine: check_wheel.py WHEEL.

Prints its size and parts. Exit status 1: it has no manylinux tag, links to more than the C++
runtime, exports more than its init function, or requires more than NumPy.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_RUNTIME = re.compile(r"(libc|libm|libgcc_s|libstdc\+\+|libpthread|libdl|librt|ld-linux-.*)\.so.*")


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def _faults(wheel: Path, archive: zipfile.ZipFile, folder: Path) -> list[str]:
    faults = []
    if "manylinux" not in wheel.name:
        faults.append(f"no manylinux tag: {wheel.name}")
    modules = [n for n in archive.namelist() if re.fullmatch(r"flash_kda/_C\..*so", n)]
    if len(modules) != 1:
        return [*faults, f"expected one extension module, got {modules}"]
    module = archive.extract(modules[0], folder)
    for line in _lines("readelf", "-dW", module):
        needed = re.search(r"\(NEEDED\).*\[(.*)\]", line)
        if needed and not _RUNTIME.fullmatch(needed[1]):
            faults.append(f"links to {needed[1]}")
    exported = [line.split()[-1] for line in _lines("nm", "-D", "--defined-only", module)]
    if exported != ["PyInit__C"]:
        faults.append(f"exports {exported}")
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))).decode()
    required = re.findall(r"^Requires-Dist: (?!.*extra ==)(.*)$", metadata, re.MULTILINE)
    if [re.split(r"\W", r)[0] for r in required] != ["numpy"]:
        faults.append(f"requires {required}")
    return faults


def main() -> int:
    """See the module's description."""
    wheel = Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        faults = _faults(wheel, archive, Path(folder))
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MiB")
        for info in sorted(archive.infolist(), key=lambda i: -i.compress_size)[:4]:
            sizes = f"{info.compress_size / 2**10:8.0f} KiB, unpacked {info.file_size / 2**10:.0f}"
            print(f"  {sizes:32} {info.filename}")
    for fault in faults:
        print(f"check_wheel: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
