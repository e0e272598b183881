"""The README's code and the examples run as they stand; links in the docs lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cli_tools import call, process

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_has_its_examples() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=["torch", "numpy", "jax"])
def test_readme_python(block: str) -> None:
    if "import torch" in block:
        pytest.importorskip("torch")
    if "import jax" in block:
        pytest.importorskip("jax")
    done = process(["-c", block])
    assert done.returncode == 0, done.stderr
    if "print(" in block:
        # The comment beside the last print says what comes out.
        expected = re.search(r"print\(.*#(.*)", block)
        assert expected is not None
        printed = re.sub(r"torch\.Size\((.*?)\)", r"\1,", done.stdout).strip().rstrip(",")
        assert printed.replace(", ", " ").split() == expected[1].replace(", ", " ").split()


def test_readme_numpy_result() -> None:
    """What the snippet leaves in `out` and `state` is what the recurrence says."""
    namespace: dict[str, object] = {}
    exec(BLOCKS[1].replace("flash_kda.fwd(", "first = state.copy()\nflash_kda.fwd("), namespace)
    from flash_kda.reference import recurrent_kda, relative_rms

    arrays = [namespace[name] for name in ("q", "k", "v", "g", "beta")]
    out, state = recurrent_kda(*arrays)[:2]
    assert relative_rms(namespace["out"], out) < 5e-3
    assert relative_rms(namespace["state"], state) < 1e-5


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("numpy_states.py", "conversation 2: outputs equal True, state in slot 2 True"),
        ("torch_layer.py", "[1, 500, 256], largest difference eager - compiled 0.0"),
        ("own_tensors.py", "flash-kda run --input"),
    ],
)
def test_examples(tmp_path: Path, name: str, printed: str) -> None:
    if name != "numpy_states.py":
        pytest.importorskip("torch")
    path = tmp_path / "tensors.safetensors"
    done = process([str(ROOT / "examples" / "python" / name), str(path)])
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert "False" not in done.stdout
    if name == "own_tensors.py":
        result = call("run", "--input", path, "--device", "cpu", "--repeats", "1")
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_links(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_commands_of_the_readme_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `flash-kda ...` line names a command and options that there are."""
    lines = re.findall(r"^    flash-kda (.*?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert len(lines) >= 6
    monkeypatch.setattr(sys, "argv", ["flash-kda"])
    for line in lines:
        command, *rest = line.split()
        options = [word for word in rest if word.startswith("--")]
        text = " ".join(call(command, "--help").output.split())
        assert "No such command" not in text
        for option in options:
            assert option in text, line
