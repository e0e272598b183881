"""torch before its C exchange API (2.10) and before versions of several tensors at once (2.6).

A fresh process takes from the installed torch what the older ones lack.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from conftest import why_no_cuda

pytest.importorskip("torch")

OLDER = """
import torch

if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
newer = torch._C._increment_version

def increment_version(tensor):
    if not isinstance(tensor, torch.Tensor):
        raise RuntimeError("increment_version expect a Tensor as input")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError("Inplace update to inference tensor outside InferenceMode")
    try:
        newer([tensor])
    except RuntimeError:
        newer(tensor)

torch._C._increment_version = increment_version

import flash_kda
from api_support import F32, BF16, assert_close, expected, problem, to_numpy, to_torch
"""


def run(code, path):
    done = subprocess.run(
        [sys.executable, "-c", OLDER + code],
        capture_output=True, text=True, timeout=300, check=False, env={"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture
def path():
    return ":".join(x for x in sys.path if x)


def test_calls(path):
    run(
        """
for dtype in (BF16, F32):
    p = problem(dtype, lengths=[3, 20])
    t = p.mapped(to_torch)
    versions = t.out._version, t.final_state._version, t.q._version
    t.fwd()
    assert (t.out._version, t.final_state._version, t.q._version) == (
        versions[0] + 1, versions[1] + 1, versions[2])
    o, final = expected(p)
    assert_close(to_numpy(t.out), o, dtype)
    assert_close(to_numpy(t.final_state), final, F32)
    o2, final2 = t.chunk_kda()
    assert torch.equal(o2, t.out) and torch.equal(final2, t.final_state)
""",
        path,
    )


def test_gradients_negatives_and_inference_tensors(path):
    run(
        """
p = problem(F32, H=1, HV=1)
o = expected(p)[0]
t = p.mapped(to_torch)
t.q = torch.nn.Parameter(t.q)
try:
    t.fwd()
    raise SystemExit("a gradient was not refused")
except NotImplementedError as error:
    assert str(error).startswith("q: ") and "requires_grad" in str(error)
with torch.no_grad():
    t.fwd()
assert_close(to_numpy(t.out), o, F32)

t = p.mapped(to_torch)
beta = t.beta
t.beta = torch.imag(torch.complex(beta, -beta).conj())
try:
    t.fwd()
    raise SystemExit("a negated view was not refused")
except ValueError as error:
    assert str(error).startswith("beta: "), error

with torch.inference_mode():
    t = p.mapped(to_torch)
    t.fwd()
    assert_close(to_numpy(t.out), o, F32)
    t.out.fill_(float("nan"))
t.fwd()
assert_close(to_numpy(t.out), o, F32)
""",
        path,
    )


@pytest.mark.skipif(bool(why_no_cuda()), reason=why_no_cuda())
def test_current_stream(path):
    """Work is queued before and after on a stream of its own; on another, NaN would be read."""
    run(
        """
p = problem(BF16, B=1, T=4096, H=4, HV=4, K=128, V=128, gate_dtype=BF16)
t = p.mapped(lambda x: to_torch(x).cuda())
q, t.q = t.q, torch.full_like(t.q, float("nan"))
busy = torch.randn(4096, 4096, device="cuda")
t.fwd()
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    for _ in range(20):
        busy = busy @ busy
        busy /= busy.abs().max()
    t.q.copy_(q)
    t.fwd()
    t.q.fill_(0)
    read = t.out.clone()
torch.cuda.synchronize()
assert_close(read.float().cpu().numpy(), expected(p)[0], BF16, "cuda")
""",
        path,
    )
