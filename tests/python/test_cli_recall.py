"""`flash-kda recall`: the encoding, the counts beside it, and that answers come from the memory."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flash_kda
from cli_tools import call, call_json, refused
from flash_kda.cli import recall as recall_module
from flash_kda.cli.text_memory import NO_ANSWER, count_predictions, decode, encode, features

TEXT = (
    "the memory holds pairs of keys and values; the memory forgets nothing; the key of a pair is "
    "what came before, the value of a pair is what comes next. \u00e9\u00fc\u4e2d "
) * 6
DATA = np.frombuffer(TEXT.encode(), np.uint8)
CPU = ("--device", "cpu")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(DATA.tobytes())
    return path


def test_a_key_is_the_query_of_the_token_before() -> None:
    q, k, v = encode(DATA, 0, DATA.size, (1, 3), 64)
    assert not k[0].any()
    assert not v[0].any()
    np.testing.assert_array_equal(k[1:], q[:-1])
    np.testing.assert_allclose(np.linalg.norm(q, axis=-1), 1, rtol=1e-5)


def test_the_value_is_the_byte_just_read() -> None:
    _, _, v = encode(DATA, 0, DATA.size, (1,), 64)
    assert decode(v[0]) == NO_ANSWER
    np.testing.assert_array_equal(decode(v[1:]), DATA[:-1])
    assert DATA.max() > 127  # both halves of the code are in the text


def test_a_query_sees_its_context_alone() -> None:
    """Equal bytes before, equal query; another byte within the context, another query."""
    a = np.frombuffer(b"..abcd", np.uint8)
    b = np.frombuffer(b"!!abcd", np.uint8)
    at = 5  # asked before the byte "d"
    for order in (1, 2, 3):
        fa, fb = (features(x, at, at + 1, (order,), 128) for x in (a, b))
        np.testing.assert_array_equal(fa, fb)
    fa, fb = (features(x, at, at + 1, (4,), 128) for x in (a, b))
    assert np.abs(fa - fb).max() > 0.01
    later = a.copy()
    later[at:] = 0  # the byte asked for, and those after it
    np.testing.assert_array_equal(
        features(a, 0, at + 1, (4,), 128), features(later, 0, at + 1, (4,), 128)
    )


def test_distinct_contexts_get_nearly_orthogonal_codes() -> None:
    every = np.frombuffer(bytes(range(256)), np.uint8)
    codes = features(np.append(every, 0), 1, 257, (1,), 128)[:, 0]
    gram = codes @ codes.T - np.eye(256)
    assert np.abs(gram).max() < 0.5
    assert np.sqrt((gram**2).mean()) < 0.11  # 1 / sqrt(128) = 0.088


def test_pieces_encode_like_the_whole() -> None:
    whole = encode(DATA, 0, DATA.size, (1, 2, 6), 96)
    for cut in (1, 2, 63, 64, DATA.size - 1):
        parts = [encode(DATA, a, b, (1, 2, 6), 96) for a, b in ((0, cut), (cut, DATA.size))]
        for one, first, second in zip(whole, *parts, strict=True):
            np.testing.assert_array_equal(one, np.concatenate([first, second]))


@pytest.mark.parametrize("order", [0, 1, 3])
def test_counts(order: int) -> None:
    """Against a count that starts anew for every byte."""
    data = DATA[:200].tobytes()
    predictions = count_predictions(DATA[:200], order)
    for t in range(len(data)):
        context = data[max(0, t - order) : t]
        followers = [data[s] for s in range(t) if data[max(0, s - order) : s] == context]
        if not followers:
            assert predictions[t] == NO_ANSWER
            continue
        counts = Counter(followers)
        most = max(counts.values())
        assert counts[int(predictions[t])] == most


def _delta_rule(data: np.ndarray, order: int, write: float) -> np.ndarray:
    """The memory in plain float64 NumPy: answers of a delta rule without decay."""
    q, k, v = (x.astype(np.float64) for x in encode(data, 0, data.size, (order,), 128))
    state = np.zeros((128, 128))
    answers = []
    for t in range(data.size):
        key = k[t, 0]
        state += write * np.outer(v[t] - state @ key, key)
        answers.append(decode((state @ q[t, 0])[None])[0])
    return np.array(answers)


def test_answers_are_those_of_a_delta_rule(
    text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 keys and read-outs may turn a near tie, no more."""
    seen: dict[str, Any] = {}
    read = recall_module.read

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.setdefault("reading", read(*args, **kwargs))
        return seen["reading"]

    monkeypatch.setattr(recall_module, "read", spy)
    call_json("recall", text_file, "--orders", "1,4", "--no-split", *CPU)
    for i, order in enumerate((1, 4)):
        expected = _delta_rule(DATA, order, 0.1)
        assert (seen["reading"].predictions[0][i] == expected).mean() > 0.99


def test_one_byte_contexts_with_full_writes_recall_the_last_follower(tmp_path: Path) -> None:
    """16 distinct bytes fit into 128 dimensions: the memory is then nearly a table."""
    rng = np.random.default_rng(3)
    follower = rng.permutation(16)
    data = np.zeros(3000, np.uint8)
    for t in range(1, data.size):  # a cycle with a surprise now and then
        data[t] = follower[data[t - 1]] if rng.random() < 0.9 else rng.integers(16)
    path = tmp_path / "cycle.bin"
    path.write_bytes((data + 97).tobytes())
    last: dict[int, int] = defaultdict(lambda: -1)
    right = 0
    for t in range(1, data.size):
        right += last[int(data[t - 1])] == data[t]
        last[int(data[t - 1])] = int(data[t])
    record = call_json("recall", path, "--orders", "1", "--write", "1", "--no-split", *CPU)
    assert record["heads"][0]["right"] == pytest.approx(right / data.size, abs=0.02)


def test_report(text_file: Path) -> None:
    record = call_json("recall", text_file, "--orders", "1,2,4", "--check-heads", "2", *CPU)
    assert record["bytes"] == DATA.size
    for head, order in zip(record["heads"], (1, 2, 4), strict=True):
        counted = (count_predictions(DATA, order) == DATA).mean()
        assert head["right_by_counts"] == pytest.approx(counted)
        assert head["right"] > record["commonest_byte"] + 0.1
    assert 0 < record["relative_error_vs_fp64"] < 5e-3
    split = record["two_calls"]
    assert split["equal_predictions"] == split["predictions"] == 3 * DATA.size
    assert split["read_outs_bitwise_equal"]
    assert split["states_bitwise_equal"]


@pytest.mark.parametrize("cut", ["1", "63", "64", "500", "100000"])
def test_any_cut_gives_the_same_answers(text_file: Path, cut: str) -> None:
    """Bit for bit on a border of chunks; elsewhere rounding may turn a near tie, no more."""
    split = call_json("recall", text_file, "--orders", "1,3", "--split-at", cut, *CPU)["two_calls"]
    if int(cut) % 64 == 0 or int(cut) > DATA.size:
        assert split["equal_predictions"] == 2 * DATA.size
        assert split["read_outs_bitwise_equal"]
        assert split["states_bitwise_equal"]
    assert split["equal_predictions"] >= 0.99 * 2 * DATA.size
    assert split["cuts"] == [min(int(cut), DATA.size)]


def test_files_of_a_batch_do_not_meet(tmp_path: Path, text_file: Path) -> None:
    """Each answers as when it is read alone; one file ends long before the other."""
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(range(256)) * 2 + b"\xff\xfe\x00 not UTF-8")
    both = call_json("recall", text_file, other, "--orders", "1,2", *CPU)
    alone = [call_json("recall", path, "--orders", "1,2", *CPU) for path in (text_file, other)]
    assert [f["right"] for f in both["files"]] == [f["files"][0]["right"] for f in alone]
    assert both["two_calls"]["read_outs_bitwise_equal"]


def test_long_texts_take_several_calls(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(DATA[:100].tobytes())
    once = call_json("recall", text_file, short, "--orders", "2", *CPU)
    monkeypatch.setattr(recall_module, "_CALL_TOKENS", 256)
    often = call_json("recall", text_file, short, "--orders", "2", *CPU)
    assert once["calls"] == 1
    assert often["calls"] == -(-DATA.size // 128)
    assert once["files"] == often["files"]
    assert often["two_calls"]["read_outs_bitwise_equal"]


def test_a_lost_state_ends_with_status_1(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of the two readings notices an operator that starts from zero each call."""
    right = flash_kda.chunk_kda

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        kwargs["initial_state"] = np.zeros_like(kwargs["initial_state"])
        return right(*args, **kwargs)

    monkeypatch.setattr(flash_kda, "chunk_kda", forgetful)
    result = call("recall", text_file, "--orders", "2", *CPU)
    assert result.exit_code == 1, result.output
    assert "the carried state is wrong" in " ".join(result.output.split())


def test_forgetting_costs_answers(text_file: Path) -> None:
    kept = call_json("recall", text_file, "--orders", "4", "--no-split", *CPU)
    lost = call_json("recall", text_file, "--orders", "4", "--no-split", "--half-life", "1", *CPU)
    assert kept["heads"][0]["right"] > lost["heads"][0]["right"] + 0.1
    assert kept["memory"]["half_life_tokens"] == "inf"


def test_table_plot_and_text(text_file: Path, tmp_path: Path) -> None:
    plot, record = tmp_path / "recall.png", tmp_path / "recall.json"
    result = call("recall", text_file, "--plot", plot, "--json-file", record, "--show", "40", *CPU)
    assert result.exit_code == 0, result.output
    assert "counts name the right byte" in " ".join(result.output.split())
    assert "what comes next" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(record.read_text())["heads"]) == 6


def test_one_byte(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(b"x")
    record = call_json("recall", path, *CPU)
    assert all(head["right"] == 0 for head in record["heads"])


def test_mistakes(tmp_path: Path, text_file: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert "no such file" in refused("recall", tmp_path / "nothing")
    assert "this is a folder" in refused("recall", tmp_path)
    assert "the file is empty" in refused("recall", text_file, empty)
    assert "--orders" in refused("recall", text_file, "--orders", "1,x")
    assert "--orders" in refused("recall", text_file, "--orders", "0")
    assert "--write" in refused("recall", text_file, "--write", "0")
    assert "--write" in refused("recall", text_file, "--write", "nan")
    assert "--half-life" in refused("recall", text_file, "--half-life", "0")
    assert "--half-life" in refused("recall", text_file, "--half-life", "nan")
    assert "--key-dim" in refused("recall", text_file, "--key-dim", "257")
    assert "files" in refused("recall").lower()
