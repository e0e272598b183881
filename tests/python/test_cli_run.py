"""`flash-kda run`: figures, options, and that a wrong result is called wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flash_kda
from cli_tools import call, call_json, refused
from flash_kda.cli.cases import CASES
from flash_kda.cli.run import parse_lengths

SMALL = ("--seq-lens", "90,0,1,64", "--heads", "2", "--key-dim", "32", "--value-dim", "16",
         "--repeats", "2", "--device", "cpu")  # fmt: skip


def test_table_and_plan() -> None:
    result = call("run", *SMALL, "--explain")
    assert result.exit_code == 0, result.output
    for text in ("90, 0, 1, 64", "tokens/s", "GB/s", "GFLOP/s", "within 0.005", "yes"):
        assert text in result.output
    assert "cpu" in result.output


@pytest.mark.parametrize(("flag", "split"), [((), True), (("--no-sequence-split",), False)])
def test_the_split_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, flag: tuple[str, ...], split: bool
) -> None:
    """What --explain prints is the plan of the very call that runs."""
    seen: list[tuple[str, bool]] = []
    plan, run = flash_kda.plan_forward, flash_kda.chunk_kda

    def planned(*args: Any, **kwargs: Any) -> Any:
        seen.append(("plan", kwargs["sequence_split"]))
        return plan(*args, **kwargs)

    def ran(*args: Any, **kwargs: Any) -> Any:
        seen.append(("run", kwargs["sequence_split"]))
        return run(*args, **kwargs)

    monkeypatch.setattr(flash_kda, "plan_forward", planned)
    monkeypatch.setattr(flash_kda, "chunk_kda", ran)
    record = call_json("run", *SMALL, "--explain", *flag)
    assert set(seen) == {("plan", split), ("run", split)}
    assert record["options"]["sequence_split"] is split
    assert "reason: " in record["plan"]


def test_explain_on_a_gpu(device: str) -> None:
    """The table is followed by segments, launches and reasons."""
    if device == "cpu":
        assert "threads" in call_json("run", *SMALL, "--explain")["plan"]
        return
    sizes = ("--seq-lens", "4096", "--heads", "4", "--repeats", "1", "--check-heads", "1")
    for flags, words in (
        ((), ("few heads: sequences in ", " segments: one of ", "3 launches", "a head")),
        (("--no-sequence-split",), ("in one piece, as asked", "1 launch", "a head")),
    ):
        result = call("run", *sizes, "--device", "cuda", "--explain", *flags)
        assert result.exit_code == 0, result.output
        shown = " ".join(result.output.split())
        for text in words:
            assert text in shown


def test_figures_follow_from_the_sizes() -> None:
    record = call_json("run", *SMALL, "--value-heads", "6", "--initial-state")
    timing = record["time"]
    assert len(timing["seconds"]) == 2
    assert timing["median_s"] == pytest.approx(np.median(timing["seconds"]))
    assert timing["flop"] == 7 * 32 * 16 * 155 * 6
    inputs = 155 * (2 * 2 * 32 + 6 * 16 + 6 * 32 + 6) * 2  # q, k, v, g, beta
    states = 4 * 6 * 16 * 32 * 4
    extra = 6 * 4 + 6 * 32 * 4 + 5 * 8  # A_log, dt_bias, cu_seqlens
    assert timing["bytes"] == inputs + 155 * 6 * 16 * 2 + 2 * states + extra
    assert timing["tokens_per_s"] == pytest.approx(155 / timing["median_s"])
    assert timing["gb_per_s"] == pytest.approx(timing["bytes"] * 1e-9 / timing["median_s"])
    assert timing["gflop_per_s"] == pytest.approx(timing["flop"] * 1e-9 / timing["median_s"])


def test_accuracy_covers_every_sequence_of_the_heads() -> None:
    accuracy = call_json("run", *SMALL, "--value-heads", "6", "--check-heads", "4")["accuracy"]
    assert len(accuracy["heads"]) == 4
    assert {0, 5} <= set(accuracy["heads"])
    found = {(row["sequence"], row["head"]) for row in accuracy["rows"]}
    assert found == {(n, head) for n in range(4) for head in accuracy["heads"]}
    assert 0 < accuracy["worst_out"] < 5e-3
    assert accuracy["within_bound"] is True


@pytest.mark.parametrize(
    "options",
    [
        ("--gate", "softplus"),
        ("--gate", "log_decay"),
        ("--beta", "doubled_logit"),
        ("--beta", "probability", "--gate", "log_decay"),
        ("--lower-bound", "-0.5", "--no-l2norm", "--scale", "0.25"),
        ("--dtype", "fp32", "--state-dtype", "bf16", "--initial-state"),
        ("--dtype", "fp16", "--gate-dtype", "fp32"),
        ("--value-heads", "4", "--threads", "1"),
    ],
)
def test_options_reach_operator_and_oracle_alike(options: tuple[str, ...]) -> None:
    if "--no-l2norm" in options:  # unnormalised keys of N(0, 1) would grow without bound
        options = (*options, "--seq-lens", "3")
    accuracy = call_json("run", *SMALL, *options)["accuracy"]
    assert 0 <= accuracy["worst_out"] < 5e-3
    assert accuracy["worst_state"] < 5e-3


def test_seed_decides_the_inputs() -> None:
    figures = [
        call_json("run", *SMALL, "--seed", seed)["accuracy"]["rows"] for seed in ("1", "1", "2")
    ]
    assert figures[0] == figures[1] != figures[2]


@pytest.mark.parametrize("fault", ["out", "state", "nan", "unwritten"])
def test_a_wrong_result_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = flash_kda.chunk_kda

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if fault == "unwritten":
            return kwargs["out"], kwargs["final_state"]
        right(*args, **kwargs)
        if fault == "out":
            kwargs["out"][0, -1, -1] += 1
        elif fault == "state":
            kwargs["final_state"][0, 0] *= 1.01
        else:
            kwargs["out"][0, 3, 0, 0] = np.nan
        return kwargs["out"], kwargs["final_state"]

    monkeypatch.setattr(flash_kda, "chunk_kda", wrong)
    result = call("run", *SMALL)
    assert result.exit_code == 1, result.output
    assert "NO" in result.output


def test_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    result = call("run", *SMALL, "--plot", path, "--json-file", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    assert (tmp_path / "run.json").stat().st_size > 100


def test_published_cases() -> None:
    assert len(CASES) == 6
    assert all(case.tokens == 8192 for case in CASES.values())
    assert {case.heads for case in CASES.values()} == {96, 64}
    assert CASES["mixed-8192-h96"].seq_lens == (1300, 547, 2048, 963, 271, 3063)


def test_a_named_case_with_fewer_heads() -> None:
    record = call_json("run", "mixed-8192-h64", "--heads", "1", "--repeats", "1", "--device", "cpu")
    assert sum(record["seq_lens"]) == 8192
    assert record["title"] == "mixed-8192-h64"
    assert record["heads"] == 1
    assert record["accuracy"]["within_bound"]


def test_nothing_but_empty_sequences() -> None:
    record = call_json("run", "--seq-lens", "0,0", "--heads", "1", "--device", "cpu")
    assert record["accuracy"]["worst_state"] == 0


def test_lengths() -> None:
    assert parse_lengths("1300,547") == (1300, 547)
    assert parse_lengths("2x3, 0") == (3, 3, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "fixed-8192"), "no case 'fixed-8192'; there are fixed-8192-h96"),
        (("run", "--seq-lens", "12,abc"), "'abc' is neither a length"),
        (("run", "--seq-lens", ""), "--seq-lens"),
        (("run", "--seq-lens", "-4"), "--seq-lens"),
        (("run", "--seq-lens", "0x7"), "--seq-lens"),
        (("run", "--heads", "0"), "--heads"),
        (("run", "--heads", "many"), "--heads"),
        (("run", "--dtype", "fp64"), "--dtype"),
        (("run", *SMALL, "--value-heads", "3"), "v"),
        (("run", *SMALL, "--key-dim", "257"), "257"),
        (("run", *SMALL, "--lower-bound", "-6"), "lower_bound"),
        (("run", *SMALL, "--lower-bound", "nan"), "lower_bound"),
        (("run", *SMALL, "--scale", "inf"), "scale"),
        (("run", *SMALL, "--plot", "/no/such/folder/x.png"), "does not exist"),
        (("run", *SMALL, "--plot", "x.xyz"), "--plot x.xyz"),
        (("run", *SMALL, "--plot", "x.png", "--check-heads", "0"), "--check-heads"),
        (("run", *SMALL, "--json-file", "/no/such/folder/x.json"), "does not exist"),
        (("run", "--seq-lens", "1", "--heads", "100000000000"), "memory"),
        (("run", "--no-such-option"), "--no-such-option"),
        (("no-such-command",), "no-such-command"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments)


def test_no_gpu_is_said_in_words() -> None:
    from flash_kda.cli.backend import cuda_missing

    if cuda_missing() is None:
        pytest.skip("there is a GPU")
    assert "--device cuda: " in refused("run", *SMALL[:-2], "--device", "cuda")
