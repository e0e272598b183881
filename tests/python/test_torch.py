"""torch: the operator, compile, gradients, modes and subclasses."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from api_support import BF16, F32, assert_close, expected, problem, to_torch

torch = pytest.importorskip("torch")

import flash_kda  # noqa: E402
from flash_kda import _C, _torch  # noqa: E402

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def torch_problem(dtype=F32, **sizes):
    return problem(dtype, **sizes).mapped(to_torch)


def operator_arguments(p, **options):
    """Of torch.ops.flash_kda.forward, for the call that fwd makes."""
    arrays = (
        p.q, p.k, p.v, p.g, p.beta, p.out, p.A_log, p.dt_bias, p.initial_state, p.final_state,
        None, None, p.cu_seqlens, None, None, None, None,
    )  # fmt: skip
    return (*arrays, _C.GATE_LOWER_BOUND, _C.BETA_LOGIT, True, -5.0, None, 0, True, False, 0)


# --- compile --------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """What a model does: projections, KDA, and something after it."""

    def __init__(self):
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.tensor([0.1, 0.4]), requires_grad=False)
        self.dt_bias = torch.nn.Parameter(torch.full((2, 16), 0.05), requires_grad=False)

    def forward(self, x, state, cu_seqlens=None):
        q, k, v, g = (x[..., 32 * i : 32 * (i + 1)].unflatten(-1, (2, 16)) for i in range(4))
        o, state = flash_kda.chunk_kda(
            q, k, v, g, x[..., 128:130], initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            lower_bound=-4.0, A_log=self.A_log, dt_bias=self.dt_bias, state_v_first=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return torch.nn.functional.silu(o) * 2, state


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", False), ("aot_eager", True), ("inductor", None)]
)
def test_compiled_module(backend, dynamic):
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tokens in (33, 50):
            x = torch.randn(2, tokens, 130, generator=generator)
            state = torch.randn(2, 2, 16, 16, generator=generator)
            got, want = compiled(x, state), layer(x, state)
            torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
            assert torch.equal(got[1], want[1])
        x = torch.randn(1, 40, 130, generator=generator)
        state = torch.randn(3, 2, 16, 16, generator=generator)
        cu_seqlens = torch.tensor([0, 7, 7, 35])
        got, want = compiled(x, state, cu_seqlens), layer(x, state, cu_seqlens)
        torch.testing.assert_close(got[0][:, :35], want[0][:, :35], rtol=1e-6, atol=1e-6)
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_fwd_writes_the_callers_tensors(backend):
    torch._dynamo.reset()
    p = problem(BF16, lengths=[5, 20])
    t = p.mapped(to_torch)

    @torch.compile(fullgraph=True, backend=backend)
    def call(q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens):
        flash_kda.fwd(
            q,
            k,
            v,
            g,
            beta,
            None,
            out,
            A_log,
            dt_bias,
            -5.0,
            initial_state,
            final_state,
            cu_seqlens,
        )
        return out.float() + 1

    plus_one = call(
        t.q, t.k, t.v, t.g, t.beta, t.out, t.A_log, t.dt_bias, t.initial_state, t.final_state,
        t.cu_seqlens,
    )  # fmt: skip
    want = expected(p)
    assert_close(t.out.float().numpy(), want[0], BF16)
    assert_close(t.final_state.numpy(), want[1], F32)
    assert torch.equal(plus_one, t.out.float() + 1)


def test_compiled_state_in_place():
    torch._dynamo.reset()
    p = problem(F32)
    want = expected(p)[1]
    t = p.mapped(to_torch)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, g, beta, A_log, dt_bias, state):
        return flash_kda.chunk_kda(
            q, k, v, g, beta, initial_state=state, final_state=state, A_log=A_log, dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0, state_v_first=True,
        )[0]  # fmt: skip

    call(t.q, t.k, t.v, t.g, t.beta, t.A_log, t.dt_bias, t.initial_state)
    assert_close(t.initial_state.numpy(), want, F32)


@pytest.mark.parametrize("state_v_first", [True, False])
def test_compiled_state_layouts(state_v_first):
    torch._dynamo.reset()
    p = problem(F32, K=16, V=16)
    want = expected(p)
    t = p.mapped(to_torch)
    state = t.initial_state if state_v_first else t.initial_state.mT.contiguous()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(state):
        return t.chunk_kda(initial_state=state, state_v_first=state_v_first)

    o, final = call(state)
    assert_close(o.numpy(), want[0], F32)
    assert_close((final if state_v_first else final.mT).numpy(), want[1], F32)


def test_compile_is_the_first_thing_done():
    """In a fresh process: no eager call has imported the operator yet, nor torch come before us."""
    code = """
import flash_kda, torch
x = torch.randn(1, 9, 2, 8)
f = torch.compile(
    lambda x: flash_kda.chunk_kda(x, x, x, -x.abs(), x.mean(-1))[0] + 1,
    fullgraph=True,
    backend="aot_eager",
)
with torch.no_grad():
    got = f(x)
    assert torch.equal(got, flash_kda.chunk_kda(x, x, x, -x.abs(), x.mean(-1))[0] + 1)
assert got.isfinite().all()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_export():
    layer = Layer().eval()
    x, state = torch.randn(2, 12, 130), torch.randn(2, 2, 16, 16)
    with torch.no_grad():
        program = torch.export.export(layer, (x, state))
        assert "flash_kda.forward" in str(program.graph)
        want = layer(x, state)
        got = program.module()(x, state)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


# --- the operator ---------------------------------------------------------------------------------


def test_operator_equals_the_eager_call():
    t = torch_problem(BF16, lengths=[5, 20])
    t.fwd()
    other = torch_problem(BF16, lengths=[5, 20])
    assert torch.ops.flash_kda.forward(*operator_arguments(other)) is None
    assert torch.equal(t.out, other.out)
    assert torch.equal(t.final_state, other.final_state)


@pytest.mark.parametrize("lengths", [None, [5, 0, 20]], ids=["batch", "packed"])
def test_opcheck(lengths):
    t = torch_problem(BF16, lengths=lengths)
    result = torch.library.opcheck(torch.ops.flash_kda.forward.default, operator_arguments(t))
    assert set(result.values()) == {"SUCCESS"}, result


def test_opcheck_with_gradients_asked_for():
    t = torch_problem(F32)
    t.q.requires_grad_()
    with pytest.raises(NotImplementedError, match="^q: .*requires_grad"):
        torch.ops.flash_kda.forward(*operator_arguments(t))


def test_eager_calls_bypass_the_dispatcher(monkeypatch):
    def fail(*_):
        raise AssertionError("went through the dispatcher")

    monkeypatch.setattr(_torch, "dispatch", fail)
    t = torch_problem(F32)
    t.fwd()
    t.chunk_kda()
    with torch.inference_mode():
        t.chunk_kda()


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INPUTS)
def test_gradients_are_refused(name):
    t = torch_problem(F32)
    getattr(t, name).requires_grad_()
    for call in (t.fwd, t.chunk_kda):
        with pytest.raises(NotImplementedError, match=f"^{name}: .*requires_grad"):
            call()
    assert t.out.isnan().all()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            t.fwd()
            o, final = t.chunk_kda()
        assert torch.equal(o, t.out)
        assert torch.equal(final, t.final_state)
        assert not o.requires_grad
        t.out.fill_(float("nan"))


def test_gradients_are_refused_for_parameters_and_outputs():
    t = torch_problem(F32)
    t.A_log = torch.nn.Parameter(t.A_log)
    with pytest.raises(NotImplementedError, match="^A_log: "):
        t.chunk_kda()
    t = torch_problem(F32)
    with pytest.raises(NotImplementedError, match="^out: "):
        t.chunk_kda(out=t.out.requires_grad_())


def test_gradients_are_refused_when_compiled():
    torch._dynamo.reset()
    t = torch_problem(F32)
    t.q.requires_grad_()
    compiled = torch.compile(
        lambda q: t.mapped(lambda x: x).chunk_kda()[0] + q.sum(), backend="eager"
    )
    with pytest.raises(NotImplementedError, match="^q: .*requires_grad"):
        compiled(t.q)

    call = torch.compile(
        lambda q: flash_kda.chunk_kda(q, t.k, t.v, t.g, t.beta)[0], fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="requires_grad"):
        call(t.q)


def test_written_tensors_get_a_new_version():
    """autograd must notice that a tensor it saved has been overwritten."""
    t = torch_problem(F32)
    weight = torch.ones_like(t.out, requires_grad=True)
    t.out.zero_()
    product = (weight * t.out).sum()
    version = t.final_state._version
    t.fwd()
    assert t.final_state._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# --- modes and subclasses -------------------------------------------------------------------------


def test_fake_tensors_never_reach_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    t = torch_problem(BF16)
    with FakeTensorMode() as mode:
        f = t.mapped(mode.from_tensor)
        f.fwd()
        o, final = f.chunk_kda()
    assert o.shape == t.out.shape
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32


def test_plain_subclass():
    class Tagged(torch.Tensor):
        pass

    p = problem(F32)
    t = p.mapped(to_torch)
    t.q, t.out = t.q.as_subclass(Tagged), t.out.as_subclass(Tagged)
    t.fwd()
    assert_close(t.out.as_subclass(torch.Tensor).numpy(), expected(p)[0], F32)


def test_make_fx_records_the_call():
    from torch.fx.experimental.proxy_tensor import make_fx

    t = torch_problem(F32)
    graph = make_fx(lambda q: flash_kda.chunk_kda(q, t.k, t.v, t.g, t.beta)[0])(t.q)
    assert "flash_kda.forward" in graph.code
    other = torch.randn_like(t.q)
    want = flash_kda.chunk_kda(other, t.k, t.v, t.g, t.beta)[0]
    assert torch.equal(graph(other), want)


def test_jit_trace_records_the_call():
    t = torch_problem(F32)
    traced = torch.jit.trace(lambda q: flash_kda.chunk_kda(q, t.k, t.v, t.g, t.beta)[0], t.q)
    assert "flash_kda::forward" in str(traced.graph)
    other = torch.randn_like(t.q)
    assert torch.equal(traced(other), flash_kda.chunk_kda(other, t.k, t.v, t.g, t.beta)[0])


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_wrappers_of_torch_func_are_loud_or_right(transform):
    t = torch_problem(F32)
    want = flash_kda.chunk_kda(t.q, t.k, t.v, t.g, t.beta)[0]

    def call(q):
        return flash_kda.chunk_kda(q, t.k, t.v, t.g, t.beta)[0]

    if transform == "vmap":
        with pytest.raises(ValueError, match="^q: .*does not give it"):
            torch.vmap(call)(torch.stack([t.q, t.q + 1]))
    elif transform == "grad":
        with pytest.raises(NotImplementedError, match="^q: .*requires_grad"):
            torch.func.grad(lambda q: call(q).sum())(t.q)
    else:
        try:
            got = torch.func.functionalize(call)(t.q)
        except (ValueError, RuntimeError):
            return
        assert torch.equal(got, want)


def test_counting_mode_sees_the_call():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    p = problem(F32)
    t = p.mapped(to_torch)
    with Names() as mode:
        t.fwd()
    assert "flash_kda.forward.default" in mode.seen
    assert_close(t.out.numpy(), expected(p)[0], F32)


def test_inference_tensors():
    p = problem(BF16)
    with torch.inference_mode():
        t = p.mapped(to_torch)
        assert t.out.is_inference()
        t.fwd()
    assert_close(t.out.float().numpy(), expected(p)[0], BF16)
    t.out.fill_(float("nan")) if not t.out.is_inference() else None
    t.fwd()  # and outside the mode


# --- tensors that have no plain memory ------------------------------------------------------------


def test_tensors_without_plain_memory():
    t = torch_problem(F32)
    for wrong in (
        t.q.to_sparse(),
        torch.empty(t.q.shape, device="meta"),
        torch.quantize_per_tensor(t.q, 0.1, 0, torch.qint8),
    ):
        with pytest.raises((ValueError, NotImplementedError, TypeError), match="^q: "):
            flash_kda.chunk_kda(wrong, t.k, t.v, t.g, t.beta)


def test_negated_views():
    """torch.imag of a conjugated tensor: its memory holds the negatives."""
    p = problem(F32, H=1, HV=1)
    t = p.mapped(to_torch)
    t.beta = torch.imag(torch.complex(t.beta, -t.beta).conj())
    assert t.beta.is_neg()
    with pytest.raises(ValueError, match="^beta: .*resolve_neg"):
        t.fwd()
    t.beta = t.beta.resolve_neg()
    t.fwd()
    assert_close(t.out.numpy(), expected(p)[0], F32)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.complex64, torch.float8_e5m2, torch.bool]
)
def test_dtypes(dtype):
    t = torch_problem(F32)
    with pytest.raises(ValueError, match="^k: .*got"):
        flash_kda.chunk_kda(t.q, t.k.to(dtype), t.v, t.g, t.beta)


def test_default_dtype_has_no_effect():
    t = torch_problem(BF16)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        o, final = t.chunk_kda()
    finally:
        torch.set_default_dtype(before)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32


def test_many_threads_at_once():
    from concurrent.futures import ThreadPoolExecutor

    p = problem(BF16, T=70)
    want = p.mapped(to_torch)
    want.fwd()

    def work(_):
        t = p.mapped(to_torch)
        for _ in range(20):
            t.out.fill_(float("nan"))
            t.fwd()
            assert torch.equal(t.out, want.out)
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def test_numpy_is_not_needed_for_torch_only_calls():
    """dt_bias [HV * K] and [HV, K], A_log of any shape."""
    t = torch_problem(F32)
    want = t.chunk_kda()
    got = t.chunk_kda(dt_bias=t.dt_bias.reshape(-1), A_log=t.A_log.reshape(1, 1, 4, 1))
    assert torch.equal(got[0], want[0])
    assert np.isfinite(got[0].numpy()).all()
