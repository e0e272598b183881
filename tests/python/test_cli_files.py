"""Tensors in files: what is read back is what was written, and bad files are refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli_tools import BF16, call_json, refused, tensors
from flash_kda.cli.files import load_tensors, save_tensors


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_round_trip_keeps_every_bit(tmp_path: Path, suffix: str, dtype: np.dtype) -> None:
    path = tmp_path / f"tensors{suffix}"
    written = tensors(dtype=dtype)
    written["q"] = np.asfortranarray(written["q"])  # not dense: the file must not care
    save_tensors(path, written)
    read = load_tensors(path)
    assert read.keys() == written.keys()
    for name, array in written.items():
        assert read[name].dtype == array.dtype, name
        np.testing.assert_array_equal(
            np.ascontiguousarray(read[name]).view(np.uint8),
            np.ascontiguousarray(array).view(np.uint8),
        )


def test_uint16_in_an_archive_is_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "bits.npz"
    np.savez(path, x=np.array([0x3F80, 0xC000], np.uint16))
    assert load_tensors(path)["x"].dtype == BF16
    assert load_tensors(path)["x"].astype(np.float32).tolist() == [1.0, -2.0]


def test_files_written_by_torch_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    path = tmp_path / "torch.safetensors"
    save_file({"x": torch.tensor([1.5, -3.0], dtype=torch.bfloat16)}, str(path))
    assert load_tensors(path)["x"].dtype == BF16
    assert load_tensors(path)["x"].astype(np.float32).tolist() == [1.5, -3.0]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_input_and_output_of_run(tmp_path: Path, suffix: str) -> None:
    """The command's result is the package's result on the same tensors, bit for bit."""
    import flash_kda

    source, target = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    given = tensors()
    save_tensors(source, given)
    record = call_json(
        "run", "--input", source, "--output", target, "--state-dtype", "bf16",
        "--repeats", "1", "--device", "cpu",
    )  # fmt: skip
    assert record["seq_lens"] == [70, 0, 33]
    assert (record["heads"], record["value_heads"]) == (2, 4)
    assert record["accuracy"]["worst_out"] < 5e-3
    final = np.full((3, 4, 48, 32), np.nan, BF16)
    out, _ = flash_kda.chunk_kda(
        **given, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0,
        use_beta_sigmoid_in_kernel=True, state_v_first=True, final_state=final,
    )  # fmt: skip
    written = load_tensors(target)
    assert set(written) == {"o", "final_state"}
    np.testing.assert_array_equal(written["o"].view(np.uint16), out.view(np.uint16))
    np.testing.assert_array_equal(written["final_state"].view(np.uint16), final.view(np.uint16))


def test_missing_file(tmp_path: Path) -> None:
    assert "nothing.npz: no such file" in refused("run", "--input", tmp_path / "nothing.npz")


def test_folder(tmp_path: Path) -> None:
    assert "this is a folder" in refused("run", "--input", tmp_path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_empty_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"empty{suffix}"
    path.touch()
    assert "the file is empty" in refused("run", "--input", path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("content", [b"not tensors \xff\xfe", b"PK\x03\x04", bytes(200)])
def test_garbage(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"garbage{suffix}"
    path.write_bytes(content)
    assert "garbage" in refused("run", "--input", path)


def test_truncated_files(tmp_path: Path) -> None:
    for suffix in (".npz", ".safetensors"):
        path = tmp_path / f"cut{suffix}"
        save_tensors(path, tensors())
        path.write_bytes(path.read_bytes()[:-100])
        assert "not a readable" in refused("run", "--input", path)


def test_unknown_suffix(tmp_path: Path) -> None:
    path = tmp_path / "tensors.pt"
    path.write_bytes(b"x")
    assert ".npz or .safetensors" in refused("run", "--input", path)
    assert ".npz or .safetensors" in refused("run", "--seq-lens", "4", "--output", path)


def test_single_array_is_not_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "array.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert "not an .npz archive" in refused("run", "--input", path)


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "objects.npz"
    np.savez(path, q=np.array([{}], dtype=object))
    assert "not a readable .npz" in refused("run", "--input", path)


def _with(tmp_path: Path, **changes: np.ndarray | None) -> Path:
    arrays = {**tensors(), **changes}
    path = tmp_path / "changed.npz"
    save_tensors(path, {name: array for name, array in arrays.items() if array is not None})
    return path


def test_wrong_names(tmp_path: Path) -> None:
    assert "'beta' is missing" in refused("run", "--input", _with(tmp_path, beta=None))
    path = _with(tmp_path, query=np.zeros(3, np.float32))
    assert "'query' is not known" in refused("run", "--input", path)


def test_wrong_shapes_and_types_name_the_tensor(tmp_path: Path) -> None:
    given = tensors()
    wrong = {
        "q": given["q"][0],
        "k": given["k"][:, :-1],
        "v": given["v"].astype(np.float64),
        "g": given["g"].astype(np.int32),
        "beta": given["beta"][..., None],
        "A_log": given["A_log"][:-1],
        "dt_bias": given["dt_bias"][:, :-1],
        "initial_state": given["initial_state"][:-1],
        "cu_seqlens": np.array([0, 90, 50, 103]),
    }
    for name, array in wrong.items():
        assert name in refused("run", "--input", _with(tmp_path, **{name: array})), name
    # Beyond the last token; and not integers at all.
    for cu in (np.array([0, 70, 70, 1000]), np.array([0.0, 70.0, 70.0, 103.0])):
        assert "cu_seqlens" in refused("run", "--input", _with(tmp_path, cu_seqlens=cu))


def test_sizes_beside_input(tmp_path: Path) -> None:
    path = _with(tmp_path)
    for more in (["mixed-8192-h96"], ["--heads", "3"], ["--seq-lens", "5"]):
        assert "--input" in refused("run", *more, "--input", path)


def test_json_of_non_finite_results(tmp_path: Path) -> None:
    """A NaN input gives a report, valid JSON, and a figure that does not pass for good."""
    q = tensors()["q"].copy()
    q[0, 5, 0, 0] = np.nan
    record = call_json("run", "--input", _with(tmp_path, q=q), "--repeats", "1", "--device", "cpu")
    assert record["accuracy"]["within_bound"] is False
    json.dumps(record, allow_nan=False)
