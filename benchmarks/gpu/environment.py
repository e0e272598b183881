"""What a result file says about where its figures come from."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_KERNEL_FOLDERS = ("src/cuda", "include")


def kernel_digest(root: Path = ROOT) -> str:
    """SHA-256 over the paths and contents of everything in src/cuda and include."""
    digest = hashlib.sha256()
    files = [p for folder in _KERNEL_FOLDERS for p in (root / folder).rglob("*") if p.is_file()]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        content = path.read_bytes()
        header = f"{path.relative_to(root).as_posix()}\n{len(content)}\n"
        digest.update(header.encode())
        digest.update(content)
    return digest.hexdigest()


def commit(given: str | None, root: Path = ROOT) -> str:
    """`given`, or git's, with "-dirty" where tracked files differ; "unknown" without git."""
    if given:
        return given
    try:
        head = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
        changed = _output(["git", "-C", str(root), "status", "--porcelain", "-uno"])
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FLASH_KDA_COMMIT", "unknown")
    return head + ("-dirty" if changed else "")


def check_device(device: str) -> None:
    """Raises ValueError where torch sees no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} sees no CUDA device")


def describe(device: str) -> dict[str, str]:
    """Device, driver, and the versions of CUDA and torch."""
    import torch

    on_gpu = device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none (cpu)",
        "driver": _driver() if on_gpu else "none",
        "cuda": torch.version.cuda or "none",
        "torch": str(torch.__version__),
    }


def file_stem(gpu: str) -> str:
    """The result file's name for a device: "NVIDIA H200" -> "h200"."""
    words = [w for w in gpu.lower().replace("(", " ").replace(")", " ").split() if w != "nvidia"]
    return "-".join(words)


def _driver() -> str:
    try:
        fields = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return _output(fields).splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
