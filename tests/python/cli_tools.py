"""Helpers of the command line's tests: one way to call it, and small tensors of a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from typer.testing import CliRunner, Result

from flash_kda.cli.app import app

BF16 = np.dtype(ml_dtypes.bfloat16)


def call(*arguments: str | Path) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def call_json(*arguments: str | Path) -> dict[str, Any]:
    """A call that must end well, with its --json output."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str | Path) -> str:
    """A call that the user got wrong: exit status 2, one line, no traceback; returns the line."""
    result = call(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    if "Usage:" in result.output:  # typer's own words about an option
        return " ".join(result.output.split())
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, result.output
    assert lines[0].startswith("flash-kda: error: ")
    return lines[0]


def process(
    code_or_module: list[str], env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python process of its own."""
    return subprocess.run(
        [sys.executable, *code_or_module],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(env or {})},
        check=False,
    )


def tensors(
    lengths: tuple[int, ...] = (70, 0, 33),
    heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 32,
    value_dim: int = 48,
    dtype: Any = BF16,
) -> dict[str, np.ndarray]:
    """A user's packed batch, with every optional tensor."""
    rng = np.random.default_rng(7)
    tokens = sum(lengths)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    return {
        "q": normal(1, tokens, heads, key_dim).astype(dtype),
        "k": normal(1, tokens, heads, key_dim).astype(dtype),
        "v": normal(1, tokens, value_heads, value_dim).astype(dtype),
        "g": normal(1, tokens, value_heads, key_dim).astype(dtype),
        "beta": normal(1, tokens, value_heads).astype(dtype),
        "A_log": np.linspace(0, 0.5, value_heads, dtype=np.float32),
        "dt_bias": 0.1 * normal(value_heads, key_dim),
        "initial_state": normal(len(lengths), value_heads, value_dim, key_dim),
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    }
