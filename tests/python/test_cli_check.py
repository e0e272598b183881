"""`flash-kda check` and `info`, the entry points, and a machine that lacks the extras."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flash_kda
from cli_tools import call, call_json, process, refused
from flash_kda import inputs


def test_a_line_for_each_input(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    result = call("check", "T7", "t12", "--quick", "--device", "cpu", "--json-file", path)
    assert result.exit_code == 0, result.output
    assert "all within bounds" in result.output
    record = json.loads(path.read_text())
    assert [item["name"] for item in record["inputs"]] == ["T7", "T12"]
    assert all(row["ok"] for item in record["inputs"] for row in item["rows"])
    measured = [r for r in record["inputs"][0]["rows"] if r["out_error"] is not None]
    assert measured
    assert all(0 < row["out_bound"] <= 1e-2 for row in measured)


def test_verbose_names_the_heads() -> None:
    result = call("check", "T7", "--quick", "--verbose", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "head" in result.output


def test_a_failure_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash_kda.chunk_kda

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        out = result[0]
        out[...] = (out.astype(np.float32) * 1.05).astype(out.dtype)
        return result

    monkeypatch.setattr(flash_kda, "chunk_kda", wrong)
    result = call("check", "T7", "--quick", "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output


def test_known_shortfalls_and_what_is_not_served_are_counted_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = inputs.Row("T1", "one row", True, 0, 0, 1e-3, 1e-3, 1e-2, 1e-2, 0.5)
    over = inputs.Row("T1", "near", False, 0, 0, 1.3e-2, 1e-3, 1e-2, 1e-2, 0.5, known="known: why")
    refused = inputs.Row("T1", "softplus", True, note="not served: a gate", served=False)
    rows = [good, over, refused]
    monkeypatch.setattr(inputs, "check", lambda *args, **more: rows)
    result = call("check", "T1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "known shortfall T1, near, sequence 0 head 0 1.30e-02 / 0.01" in result.output
    assert "not served T1, softplus: not served: a gate" in result.output
    last = result.output.strip().splitlines()[-1]
    assert "all others within bounds, 1 outside their bounds" in last
    assert "1 not served" in last
    record = call_json("check", "T1", "--device", "cpu")
    assert record["ok"]
    assert record["known_shortfalls"] == record["not_served"] == 1

    rows.append(inputs.Row("T1", "other", False, 0, 0, 2e-2, 1e-3, 1e-2, 1e-2, 0.5))
    result = call("check", "T1", "--device", "cpu")
    assert result.exit_code == 1
    assert "1 OUTSIDE their bounds or not run, 1 outside" in result.output.strip().splitlines()[-1]


def test_list_names_every_input() -> None:
    result = call("check", "--list")
    assert result.exit_code == 0
    assert all(name in result.output for name in inputs.NAMES)


def test_unknown_input() -> None:
    assert "no input 'T99'; there are" in refused("check", "T99")


def test_info() -> None:
    record = call_json("info")
    assert record["version"] == flash_kda.__version__
    assert {b["name"] for b in record["backends"]} == {b.name for b in flash_kda.backends()}
    assert record["libraries"]["numpy"] == np.__version__
    assert Path(record["extension"]).is_file()
    assert Path(record["cmake_dir"]).is_dir()
    text = call("info").output
    assert "backend cpu" in text
    assert flash_kda.__version__ in text


def test_python_dash_m() -> None:
    done = process(["-m", "flash_kda", "info", "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == flash_kda.__version__
    done = process(["-m", "flash_kda", "--cmake-dir"])
    assert Path(done.stdout.strip()).joinpath("flash_kdaConfig.cmake").is_file() or any(
        Path(done.stdout.strip()).glob("*onfig.cmake")
    )


def test_exit_status_of_a_process() -> None:
    done = process(["-m", "flash_kda", "run", "nonsense"])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("flash-kda: error: no case 'nonsense'")
    assert len(done.stderr.splitlines()) == 1


def test_piped_json_is_all_that_is_printed() -> None:
    done = process(
        ["-m", "flash_kda", "run", "--seq-lens", "20", "--heads", "1", "--device", "cpu", "--json"]
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["seq_lens"] == [20]
    assert done.stderr == ""


_BLOCK = """
import sys
blocked = {blocked!r}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
sys.argv = ["flash-kda", *{arguments!r}]
from flash_kda.cli import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "rich", "ml_dtypes"])
def test_the_command_line_without_its_extras(module: str) -> None:
    done = process(["-c", _BLOCK.format(blocked=[module], arguments=["info"])])
    assert done.returncode == 2, done.stderr
    assert f"needs {module}" in done.stderr
    assert "pip install 'flash-kda[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("matplotlib", ["--plot", "x.png"]),
        ("safetensors", ["--output", "x.safetensors"]),
    ],
)
def test_options_without_their_extras(module: str, arguments: list[str]) -> None:
    small = ["run", "--seq-lens", "4", "--heads", "1", "--device", "cpu"]
    done = process(["-c", _BLOCK.format(blocked=[module], arguments=[*small, *arguments])])
    assert done.returncode == 2, done.stderr
    assert f"needs {module}" in done.stderr
    done = process(["-c", _BLOCK.format(blocked=[module, "torch", "jax"], arguments=small)])
    assert done.returncode == 0, done.stderr
