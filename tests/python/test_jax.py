"""chunk_kda as a foreign function of XLA: inside jax.jit, and on a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import flash_kda
from api_support import BF16, F16, F32, assert_close, expected, problem
from flash_kda import _C, _arrays

jax = pytest.importorskip("jax")
_jax = pytest.importorskip("flash_kda._jax")
pytestmark = pytest.mark.skipif(not hasattr(jax, "ffi"), reason="needs jax 0.5")


def gpus():
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


def serving_gpu():
    available = any(b.name.startswith("cuda") and b.available for b in flash_kda.backends())
    return gpus()[0] if available and gpus() else None


GPU = pytest.mark.skipif(serving_gpu() is None, reason="needs a GPU that JAX and a backend serve")
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("gpu", id="gpu", marks=GPU)]


def placed(p, where):
    device = jax.devices("cpu")[0] if where == "cpu" else serving_gpu()
    return p.mapped(lambda x: jax.device_put(x, device))


def traced(p, **options):
    """chunk_kda of arrays that are arguments of jax.jit; those that it closes over have data."""
    fields = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
    given = {name: x for name, x in fields.items() if x is not None}
    run = jax.jit(lambda given: dataclasses.replace(p, **given).chunk_kda(**options))
    return run(given)


def served_by_gpu(**options):
    """A problem of the shape and types that the CUDA backend serves."""
    return problem(BF16, K=128, V=128, gate_dtype=BF16, **options)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("gate_dtype", [BF16, F32], ids=str)
def test_jit_on_the_cpu(dtype, gate_dtype, monkeypatch):
    forward, calls = _jax.forward, []
    monkeypatch.setattr(_jax, "forward", lambda *a: calls.append(a) or forward(*a))
    p = problem(dtype, gate_dtype=gate_dtype, lengths=[3, 0, 26])
    o, final = traced(placed(p, "cpu"))
    assert len(calls) == 1
    assert o.dtype == dtype
    assert final.dtype == F32
    want_o, want_final = expected(p)
    assert_close(o, want_o, dtype)
    assert_close(final, want_final, F32)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("state_dtype", [BF16, F32], ids=str)
def test_jit_with_traced_arrays(where, state_v_first, state_dtype):
    p = served_by_gpu(lengths=[70, 0, 1, 33], state_dtype=state_dtype)
    j = placed(p, where)

    @jax.jit
    def run(q, k, v, g, beta, A_log, dt_bias, state, offsets):
        if not state_v_first:
            state = state.swapaxes(-1, -2)
        o, final = flash_kda.chunk_kda(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=state,
            cu_seqlens=offsets, output_final_state=True, state_v_first=state_v_first,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
        )  # fmt: skip
        return 2 * o, final if state_v_first else final.swapaxes(-1, -2)

    arrays = (j.q, j.k, j.v, j.g, j.beta, j.A_log, j.dt_bias, j.initial_state, j.cu_seqlens)
    want_o, want_final = expected(p)
    for _ in range(2):  # the second time from the cache of compiled programs
        o, final = run(*arrays)
        assert_close(np.asarray(o) / 2, want_o, BF16, where)
        assert_close(final, want_final, F32, where)


@pytest.mark.parametrize("where", DEVICES)
def test_without_optional_arrays(where):
    p = served_by_gpu(B=2, T=37)
    p.A_log = p.dt_bias = p.initial_state = None
    o, final = traced(placed(p, where), output_final_state=False)
    assert final is None
    assert_close(o, expected(p)[0], BF16, where)


@GPU
def test_eager_on_a_gpu():
    p = served_by_gpu(B=2, T=100)
    j = placed(p, "gpu")
    o, final = j.chunk_kda()
    assert isinstance(o, jax.Array)
    assert o.devices() == final.devices() == {serving_gpu()}
    want_o, want_final = expected(p)
    assert_close(o, want_o, BF16, "gpu")
    assert_close(final, want_final, BF16, "gpu")


@GPU
def test_eager_on_a_gpu_waits_for_what_was_queued_and_is_waited_for():
    """q comes out of a long chain of products and the output goes into one; no host waits."""
    p = served_by_gpu(B=1, T=4096, H=4, HV=4)
    j = placed(p, "gpu")
    identity = jax.device_put(np.eye(4096, dtype=np.float32), serving_gpu())
    late = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: identity @ y, x))
    flat = late(j.q.reshape(4096, -1).astype(np.float32))
    j.q = flat.reshape(p.q.shape).astype(BF16)
    o, _ = j.chunk_kda()
    o = late(o.reshape(4096, -1).astype(np.float32)).reshape(p.v.shape)
    assert_close(o, expected(p)[0], BF16, "gpu")


@GPU
def test_fwd_with_inputs_of_jax_and_outputs_of_cupy():
    cupy = pytest.importorskip("cupy")
    p = served_by_gpu(B=2, T=100)
    j = placed(p, "gpu")
    bits = cupy.full(p.out.shape, 0x7FC0, np.uint16)  # NaN; not every CuPy fills the type itself
    out = bits.view(BF16)
    state = cupy.full(p.final_state.shape, np.nan, np.float32)
    cupy.cuda.Device().synchronize()
    flash_kda.fwd(
        j.q, j.k, j.v, j.g, j.beta, None, out, j.A_log, j.dt_bias, -5.0, j.initial_state, state
    )
    cupy.cuda.Device().synchronize()
    want_o, want_final = expected(p)
    assert_close(cupy.asnumpy(state), want_final, BF16, "gpu")
    assert_close(cupy.asnumpy(bits).view(BF16), want_o, BF16, "gpu")


@GPU
def test_what_the_gpu_does_not_serve_is_named():
    p = problem(F32)
    with pytest.raises(
        (NotImplementedError, jax.errors.JaxRuntimeError), match="expected bfloat16 on cuda:0"
    ):
        jax.block_until_ready(placed(p, "gpu").chunk_kda())


@pytest.mark.parametrize("where", DEVICES)
def test_vmap(where):
    p = served_by_gpu(B=3, T=21)
    j = placed(p, where)
    p.initial_state = j.initial_state = None

    def one(q, k, v, g, beta):
        o, final = flash_kda.chunk_kda(
            q[None], k[None], v[None], g[None], beta[None], A_log=j.A_log, dt_bias=j.dt_bias,
            output_final_state=True, state_v_first=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
        )  # fmt: skip
        return o[0], final[0]

    o, final = jax.vmap(one)(j.q, j.k, j.v, j.g, j.beta)
    want_o, want_final = expected(p)
    assert_close(o, want_o, BF16, where)
    assert_close(final, want_final, F32, where)


def test_every_option_reaches_the_kernel():
    """Against the eager call, which takes another way to the same backend: bit for bit."""
    p = problem(F32, lengths=[3, 20, 9])
    j = placed(p, "cpu")
    for options in (
        {"scale": 0.1},
        {"use_qk_l2norm_in_kernel": False, "scale": 1 / 3},
        {"lower_bound": -0.7},
        {"lower_bound": None},
        {"allow_neg_eigval": True},
        {"use_beta_sigmoid_in_kernel": False},
        {"threads": 1, "value_split": 2, "sequence_split": False, "check_cu_seqlens": True},
    ):
        want_o, want_final = p.chunk_kda(**options)
        o, final = traced(j, **options)
        assert np.asarray(o).tobytes() == want_o.tobytes(), options
        assert np.asarray(final).tobytes() == want_final.tobytes(), options
    base = p.chunk_kda()[0]
    for options in ({"scale": 0.1}, {"lower_bound": -0.7}, {"lower_bound": None}):
        assert p.chunk_kda(**options)[0].tobytes() != base.tobytes()


def test_log_decay_and_slots():
    p = problem(F32, lengths=[3, 20, 9])
    p.g = -abs(p.g)
    p.A_log = p.dt_bias = None
    slots = np.array([2, -1, 0], np.int32)
    j = placed(p, "cpu")
    options = {"use_gate_in_kernel": False, "lower_bound": None}
    want_o, want_final = p.chunk_kda(initial_state_indices=slots, **options)
    o, final = traced(
        j, initial_state_indices=jax.device_put(slots, jax.devices("cpu")[0]), **options
    )
    assert np.asarray(o).tobytes() == want_o.tobytes()
    assert np.asarray(final).tobytes() == want_final.tobytes()


def test_empty_calls():
    p = problem(F32, T=0)
    o, final = traced(placed(p, "cpu"))
    assert o.shape == p.v.shape
    assert np.asarray(final).tobytes() == p.initial_state.tobytes()


def test_wrong_calls_name_the_argument_when_they_are_traced():
    p = problem(F32)
    j = placed(p, "cpu")

    def refuse(error, match, change=None, **options):
        bad = placed(p, "cpu")
        for name, x in (change or {}).items():
            setattr(bad, name, x)
        with pytest.raises(error, match=match):
            traced(bad, **options)

    refuse(ValueError, "^k: ", {"k": j.k[:, :-1]})
    refuse(ValueError, "^beta: ", {"beta": j.beta[..., None]})
    refuse(ValueError, "^q: .*int32", {"q": j.q.astype(np.int32)})
    refuse(ValueError, "^A_log: ", {"A_log": j.A_log[:1]})
    refuse(ValueError, "^initial_state: ", {"initial_state": j.initial_state[:1]})
    refuse(ValueError, "^lower_bound: ", lower_bound=1.0)
    refuse(TypeError, "^threads: ", threads="two")
    refuse(TypeError, "^scale: ", scale="big")
    refuse(ValueError, "^out: expected None with JAX", out=p.out)
    refuse(ValueError, "^final_state: expected None with JAX", final_state=j.final_state)
    refuse(TypeError, "^beta: expected an array", {"beta": [1.0]})
    with pytest.raises(NotImplementedError, match="^plan_forward: "):
        jax.jit(lambda q: flash_kda.plan_forward(q, q, q, q, q[..., 0]))(j.q)


def test_wrong_offsets_are_found_when_they_are_known():
    p = problem(F32, lengths=[3, 20])
    p.cu_seqlens = np.array([0, 9, 5])
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="cu_seqlens: "):
        jax.block_until_ready(traced(placed(p, "cpu")))


def test_no_gradient():
    p = problem(F32)
    j = placed(p, "cpu")

    def loss(q):
        j.q = q
        return j.chunk_kda()[0].sum()

    with pytest.raises(ValueError, match="differentiate"):
        jax.grad(loss)(j.q)


def test_eager_calls_on_the_cpu_take_the_shorter_way(monkeypatch):
    p = problem(F32)
    monkeypatch.setattr(_jax, "forward", lambda *_: pytest.fail("went through XLA"))
    o, _ = placed(p, "cpu").chunk_kda()
    assert_close(o, expected(p)[0], F32)
    assert not _arrays.needs_xla((p.q, None, placed(p, "cpu").q))


def test_platforms():
    with pytest.raises(ValueError, match="^platform: "):
        _C.xla_handler("tpu")
