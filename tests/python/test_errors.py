"""Wrong calls one by one: the type, the argument's name in the text, no write, no after-effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flash_kda
from flash_kda.inputs.call import from_torch, is_poison, poison, same_bits, to_torch
from flash_kda.inputs.problem import BF16, FP16, FP32
from flash_kda.metrics import errors_by_head
from flash_kda.reference import recurrent_kda
from wrong_calls import NUMPY_ONLY, WRONG, Call, Change, all_, good_call, problem, set_, with_

FRAMEWORKS = ["numpy", "torch"]
# "out is v" apart, these views of one memory are made of NumPy arrays
SHARED_MEMORY = {"out is v", "out overlaps g", "states overlap in part", "final_state is q"}
FWD = ("q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound")
FWD_STATES = ("initial_state", "final_state", "cu_seqlens")


def to_framework(call: Call, framework: str) -> Call:
    if framework == "numpy":
        return call
    device = "cuda" if framework == "cuda" else "cpu"
    names = {"bfloat16", "float16", "float32", "int32", "int64"}

    def convert(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.name in names and all(s >= 0 for s in x.strides):
            return to_torch(x, device)
        import torch

        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    kept: dict[int, Any] = {}  # one array twice stays one tensor
    return {n: kept.setdefault(id(x), convert(x)) for n, x in call.items()}


def outputs(call: Call) -> list[np.ndarray]:
    found = [call.get(n) for n in ("out", "final_state", "checkpoint_states")]
    arrays = [x if isinstance(x, np.ndarray) else from_torch(x) for x in found if x is not None]
    return [x for x in arrays if x.dtype in (BF16, FP32)]


def good_result(framework: str) -> list[np.ndarray]:
    call = to_framework(good_call(problem()), framework)
    flash_kda.chunk_kda(**call)
    return outputs(call)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", WRONG | NUMPY_ONLY)
def test_wrong_call(name: str, framework: str) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
        if name in NUMPY_ONLY or name in SHARED_MEMORY - {"out is v"}:
            pytest.skip("the same views of memory take NumPy arrays")
    before = good_result(framework)
    change, error, text = (WRONG | NUMPY_ONLY)[name]
    call = good_call(problem())
    change(call)
    call = to_framework(call, framework)
    with pytest.raises(error, match=text) as caught:
        flash_kda.chunk_kda(**call)
    assert type(caught.value) is error
    if error is ValueError:
        assert "expected" in str(caught.value)
        assert "got" in str(caught.value)
    if name not in SHARED_MEMORY:
        assert all(is_poison(x) for x in outputs(call)), "something was written"
    after = good_result(framework)
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "name",
    [
        n
        for n in WRONG
        if n.startswith(("v ", "q ", "k ", "g ", "beta ", "A_log [", "dt_bias", "cu_"))
    ]
    + ["K 257", "out fp32", "out other T", "out is v", "lower_bound nan", "lower_bound +1"]
    + ["lower_bound -6", "lower_bound -inf", "initial_state N + 1", "initial_state [N, HV, K]"]
    + ["final_state N - 1", "scale nan", "states overlap in part"],
)
def test_wrong_fwd(name: str, framework: str) -> None:
    """The same through the fixed positional call."""
    if framework == "torch":
        pytest.importorskip("torch")
        if name == "states overlap in part":
            pytest.skip("the same views of memory take NumPy arrays")
    change, error, text = WRONG[name]
    call = good_call(problem())
    change(call)
    call = to_framework(call, framework)
    with pytest.raises(error, match=text) as caught:
        flash_kda.fwd(*(call[n] for n in FWD), **{n: call[n] for n in FWD_STATES})
    assert type(caught.value) is error
    if name not in SHARED_MEMORY:
        assert all(is_poison(x) for x in outputs(call))
    p = problem()
    right = to_framework(good_call(p), framework)
    flash_kda.fwd(*(right[n] for n in FWD), **{n: right[n] for n in FWD_STATES})
    assert all(same_bits(a, b) for a, b in zip(outputs(right), good_result(framework), strict=True))


def test_fwd_refuses_what_it_cannot_mean() -> None:
    call = good_call(problem())
    values = [call[n] for n in FWD]
    with pytest.raises(ValueError, match="^lower_bound: .*None"):
        flash_kda.fwd(*values[:-1], None)
    with pytest.raises(TypeError, match="head_first"):
        flash_kda.fwd(*values, head_first=True)
    with pytest.raises(TypeError, match="lower_bound"):
        flash_kda.fwd(*values[:-1])
    with pytest.raises(TypeError, match="^out: .*None"):
        flash_kda.fwd(*values[:6], None, *values[7:])
    assert is_poison(call["out"])


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_gradients_are_refused(name: str) -> None:
    torch = pytest.importorskip("torch")
    call = to_framework(good_call(problem()), "torch")
    call[name] = call[name].detach().requires_grad_()
    for run in (
        lambda: flash_kda.chunk_kda(**call),
        lambda: flash_kda.fwd(*(call[n] for n in FWD), **{n: call[n] for n in FWD_STATES}),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}.*forward"):
            run()
        assert is_poison(from_torch(call["out"]))
    with torch.no_grad():
        flash_kda.chunk_kda(**call)
    assert same_bits(from_torch(call["out"]), good_result("torch")[0])


def accepted() -> dict[str, tuple[Change, dict[str, Any]]]:
    """Calls that look odd and are right: the change, and the reference's options that match."""
    offsets = np.array([0, 9, 70, 9, 100, 9])[::2]
    fp16 = all_(*(with_(n, lambda x: x.astype(FP16)) for n in ("q", "k", "v", "out")))
    return {
        "fp16 arrays": (all_(fp16, with_("out", poison)), {}),
        "fp32 g and beta": (all_(*(with_(n, lambda x: x.astype(FP32)) for n in ("g", "beta"))), {}),
        "A_log None": (set_(A_log=None), {"A_log": None}),
        "dt_bias None": (set_(dt_bias=None), {"dt_bias": None}),
        "A_log [1, 1, HV, 1]": (with_("A_log", lambda x: x.reshape(1, 1, 4, 1)), {}),
        "dt_bias [HV * K]": (with_("dt_bias", lambda x: x.reshape(-1)), {}),
        "cu_seqlens int32": (with_("cu_seqlens", lambda x: x.astype(np.int32)), {}),
        "cu_seqlens with a step": (set_(cu_seqlens=offsets), {}),
        "initial_state bf16": (with_("initial_state", lambda x: x.astype(BF16)), {}),
        "final_state bf16": (set_(final_state=poison(np.empty((2, 4, 128, 128), BF16))), {}),
        "no bound: softplus": (set_(lower_bound=None, safe_gate=False), {"gate": "softplus"}),
        "scale an int": (set_(scale=2), {"scale": 2.0}),
        "scale of NumPy": (set_(scale=np.float32(0.5)), {"scale": 0.5}),
        "lower_bound 0": (set_(lower_bound=0), {"lower_bound": 0.0}),
        "lower_bound -5": (set_(lower_bound=-5), {}),
    }


@pytest.mark.parametrize("name", accepted())
def test_odd_but_right(name: str) -> None:
    change, options = accepted()[name]
    p = problem()
    call = good_call(p)
    change(call)
    flash_kda.chunk_kda(**call)
    arrays = {n: call[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")}
    o, final = recurrent_kda(**(arrays | options), cu_seqlens=call["cu_seqlens"])[:2]
    got = [(call["out"], o, p.cu_seqlens), (call["final_state"][:, None], final[:, None], None)]
    for x, ref, offsets in got:
        for e in errors_by_head(x, ref, offsets):
            assert e.rms <= 5e-3, f"{name}: {e}"


def test_wrong_calls_on_a_gpu(device: str) -> None:
    """What a GPU alone refuses; and the rules that need no look at device memory."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    before = good_result("cuda")
    for name, (change, error, text) in WRONG.items():
        if name.startswith(("cu_seqlens", "slot", "final slot", "checkpoint")):
            continue  # these look at contents, which stay on the device
        if (
            name in SHARED_MEMORY or name == "q alone fp16"
        ):  # a q of fp16 is refused by itself there
            continue
        call = good_call(problem())
        change(call)
        with pytest.raises(error, match=text):
            flash_kda.chunk_kda(**to_framework(call, "cuda"))
    gpu = to_framework(good_call(problem()), "cuda")
    host = to_framework(good_call(problem()), "torch")
    for name in (
        "k",
        "v",
        "g",
        "beta",
        "A_log",
        "out",
        "initial_state",
        "final_state",
        "cu_seqlens",
    ):
        with pytest.raises(ValueError, match=f"^{name}: .*cuda"):
            flash_kda.chunk_kda(**(gpu | {name: host[name]}))
    fp16 = good_call(problem())
    for name in ("q", "k", "v", "out"):
        fp16[name] = fp16[name].astype(FP16)
    with pytest.raises(NotImplementedError, match="^q.*float16"):
        flash_kda.chunk_kda(**to_framework(fp16, "cuda"))
    after = good_result("cuda")
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))
