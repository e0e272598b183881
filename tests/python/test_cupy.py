"""CuPy arrays on a GPU, on CuPy's current stream."""

from __future__ import annotations

import numpy as np
import pytest

import flash_kda
from api_support import BF16, assert_close, expected, problem
from conftest import why_no_cuda

if why_no_cuda():
    pytest.skip(why_no_cuda(), allow_module_level=True)
cupy = pytest.importorskip("cupy")

SIZES = {"K": 128, "V": 128, "gate_dtype": BF16}


def to_cupy(x):
    if x.dtype == BF16:  # its bits: not every CuPy copies the type itself
        return cupy.asarray(x.view(np.uint16)).view(BF16)
    return cupy.asarray(x)


def to_numpy(x):
    if x.dtype == BF16:
        return cupy.asnumpy(x.view(cupy.uint16)).view(BF16)
    return cupy.asnumpy(x)


@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 33]], ids=["dense", "packed"])
@pytest.mark.parametrize("state_dtype", [BF16, np.float32], ids=["bf16", "fp32"])
def test_fwd(lengths, state_dtype):
    p = problem(BF16, lengths=lengths, state_dtype=state_dtype, **SIZES)
    c = p.mapped(to_cupy)
    c.fwd()
    want_o, want_final = expected(p)
    assert_close(to_numpy(c.out), want_o, BF16, "cuda")
    assert_close(to_numpy(c.final_state), want_final, BF16, "cuda")


def test_chunk_kda_allocates_from_cupy():
    p = problem(BF16, lengths=[70, 0, 1, 33], **SIZES)
    o, final = p.mapped(to_cupy).chunk_kda()
    assert isinstance(o, cupy.ndarray)
    assert o.dtype == BF16
    assert final.dtype == np.float32
    want_o, want_final = expected(p)
    assert_close(to_numpy(o), want_o, BF16, "cuda")
    assert_close(to_numpy(final), want_final, BF16, "cuda")


@pytest.mark.parametrize("stream", ["non-blocking", "per thread"])
def test_current_stream(stream):
    """Inputs arrive late and outputs are read on the stream; on another, both would be NaN."""
    p = problem(BF16, B=1, T=4096, H=4, HV=4, **SIZES)
    c = p.mapped(to_cupy)
    q, k = c.q, c.k
    busy = cupy.random.standard_normal((4096, 4096), np.float32)
    late_q, late_k = (to_cupy(np.full(p.q.shape, np.nan, BF16)) for _ in range(2))
    c.q, c.k = late_q, late_k
    c.fwd()  # plans and loads; poisons out with NaN
    cupy.cuda.Device().synchronize()
    queue = (
        cupy.cuda.Stream(non_blocking=True) if stream == "non-blocking" else cupy.cuda.Stream.ptds
    )
    with queue:
        for _ in range(20):
            busy @= busy
            busy /= cupy.abs(busy).max()
        late_q.view(cupy.uint16)[...] = q.view(cupy.uint16)
        late_k.view(cupy.uint16)[...] = k.view(cupy.uint16)
        c.fwd()
        late_q.view(cupy.uint16)[...] = 0
        read = c.out.view(cupy.uint16).copy().view(BF16)
    queue.synchronize()
    assert_close(to_numpy(read), expected(p)[0], BF16, "cuda")


def test_pieces_of_one_projection():
    p = problem(BF16, B=1, T=50, H=2, HV=2, **SIZES)
    matrix = cupy.full((1, 50, 4 * 256), 0x7FC0, np.uint16)  # NaN
    c = p.mapped(to_cupy)
    for i, name in enumerate(("q", "k", "v", "g")):
        block = matrix[:, :, 256 * i : 256 * (i + 1)]
        block[...] = getattr(c, name).view(cupy.uint16).reshape(1, 50, 256)
        view = block.reshape(1, 50, 2, 128)
        assert view.base is not None
        setattr(c, name, view.view(BF16))
    c.fwd()
    assert_close(to_numpy(c.out), expected(p)[0], BF16, "cuda")


def test_memory_is_given_back():
    pool = cupy.get_default_memory_pool()
    p = problem(BF16, lengths=[70] * 40, H=4, HV=4, **SIZES)
    c = p.mapped(to_cupy)
    c.fwd()
    used = pool.used_bytes()
    for _ in range(10):
        c.fwd()
    assert pool.used_bytes() == used


def test_several_devices():
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    p = problem(BF16, lengths=[70, 0, 1, 33], **SIZES)
    with cupy.cuda.Device(1):
        c = p.mapped(to_cupy)
    with cupy.cuda.Device(0):  # current, and not the arrays'
        o, _ = c.chunk_kda()
    assert o.device.id == 1
    assert_close(to_numpy(o), expected(p)[0], BF16, "cuda")


def test_plan():
    c = problem(BF16, **SIZES).mapped(to_cupy)
    plan = flash_kda.plan_forward(
        c.q, c.k, c.v, c.g, c.beta, use_gate_in_kernel=True, lower_bound=-5.0,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert plan.backend == "cuda-sm90"
