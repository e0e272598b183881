"""torch on the GPU: compile, graphs of `chunk_kda`, AMP, modes, streams, devices, the operator.

What needs no GPU runs on the CPU too. `fwd` in graphs and on streams is test_cuda.py's business.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flash_kda  # noqa: E402
from flash_kda import _C  # noqa: E402
from flash_kda.metrics import relative_rms  # noqa: E402
from test_cuda import (  # noqa: E402
    BF16,
    F32,
    Call,
    D,
    assert_accurate,
    assert_same,
    bits,
    busy,
    make,
)

HEADS = 2
LENGTHS = [100, 0, 33, 64]
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


# --- modules --------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """One projection, whose column blocks go into KDA as they are, and something after it."""

    def __init__(self, width=64):
        super().__init__()
        self.sizes = [HEADS * D] * 4 + [HEADS]
        self.project = torch.nn.Linear(width, sum(self.sizes) + 6, bias=False)
        self.A_log = torch.nn.Parameter(torch.tensor([0.1, 0.4]))
        self.dt_bias = torch.nn.Parameter(torch.linspace(-0.1, 0.1, HEADS * D))

    def inputs(self, x):
        *blocks, beta, _ = self.project(x).split([*self.sizes, 6], dim=-1)
        return *(block.unflatten(-1, (HEADS, D)) for block in blocks), beta

    def kda(self, inputs, state, cu_seqlens=None):
        return flash_kda.chunk_kda(
            *inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
            A_log=self.A_log, dt_bias=self.dt_bias, state_v_first=True, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    def forward(self, x, state, cu_seqlens=None):
        o, state = self.kda(self.inputs(x), state, cu_seqlens)
        return torch.nn.functional.silu(o) * 2, state


def layer(device, dtype=BF16):
    """Weights in `dtype`, but A_log and dt_bias in fp32."""
    torch.manual_seed(0)
    made = Layer().to(device)
    made.project.to(dtype)
    return made


def rows(device, batch, tokens, seed, dtype=BF16):
    """Inputs [B, T, width] and states [B, H, V, K] of a Layer."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, 64, generator=rng).to(dtype).to(device)
    return x, torch.randn(batch, HEADS, D, D, generator=rng).to(device)


def assert_near(got, want):
    """Results of one module: projections by other kernels may round elsewhere, and that is all."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert not torch.isnan(a).any()
        assert relative_rms(a, b) <= 5e-3


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", False), ("aot_eager", True), ("inductor", None)]
)
def test_compiled_module(device, backend, dynamic):
    """fullgraph: nothing falls out of the graph. Two lengths, then a packed batch."""
    torch._dynamo.reset()
    module = layer(device)
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
    with torch.inference_mode():
        for tokens in (100, 161):
            x, state = rows(device, 2, tokens, tokens)
            assert_near(compiled(x, state), module(x, state))
        x, _ = rows(device, 1, sum(LENGTHS), 3)
        _, states = rows(device, len(LENGTHS), 1, 4)
        cu_seqlens = torch.tensor([0, 100, 100, 133, 197], device=device)
        assert_near(compiled(x, states, cu_seqlens), module(x, states, cu_seqlens))


def test_compiled_module_cast_as_a_whole(device):
    """`module.to(torch.bfloat16)` casts A_log and dt_bias too."""
    torch._dynamo.reset()
    module = layer(device).to(BF16)
    assert module.A_log.dtype == BF16
    wide = layer(device)
    with torch.no_grad():
        for name in ("A_log", "dt_bias"):
            getattr(wide, name).copy_(getattr(module, name))
    x, state = rows(device, 2, 70, 5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        want = wide(x, state)
        assert_same(module(x, state), want, "eager")
        assert_same(compiled(x, state), want, "compiled")


def test_compiled_into_cuda_graphs(cuda):
    """Inductor's own graphs (reduce-overhead), replayed with new contents."""
    torch._dynamo.reset()
    module = layer(cuda)
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    with torch.inference_mode():
        for seed in range(6):
            x, state = rows(cuda, 2, 100, seed)
            torch.compiler.cudagraph_mark_step_begin()
            got = [y.clone() for y in compiled(x, state)]
            assert_near(got, module(x, state))


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, LENGTHS, [(29 * i) % 97 for i in range(60)]])
def test_graph_of_chunk_kda(cuda, lengths):
    """Its outputs come from the graph's pool; new contents, new offsets of the same N, poison."""
    call, other = (make(cuda, lengths=lengths, heads=4, tokens=170, seed=s) for s in (1, 2))
    if lengths is not None:
        other = other.but(cu_seqlens=torch.tensor([0, *reversed(lengths)], device=cuda).cumsum(0))
    want = [c.chunk_kda() for c in (call, other)]
    assert_accurate(other, want[1])
    names = [n for n in (*TENSORS, "cu_seqlens") if getattr(call, n) is not None]
    kept = call.but(**{n: getattr(call, n).clone() for n in names})
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        kept.chunk_kda()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kept.chunk_kda()
    for r in range(6):
        source = (call, other)[r % 2]
        for name in names:
            getattr(kept, name).copy_(getattr(source, name))
        for x in got:
            x.fill_(torch.nan)
        graph.replay()
        assert_same(got, want[r % 2], f"replay {r}")


def test_graph_of_a_module(cuda):
    """Projection and KDA in one graph; parameters in bf16, which are widened inside it."""
    module = layer(cuda).to(BF16)
    with torch.inference_mode():
        x, state = rows(cuda, 2, 100, 0)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            module(x, state)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = module(x, state)
        for seed in (1, 2, 3):
            other = rows(cuda, 2, 100, seed)
            x.copy_(other[0])
            state.copy_(other[1])
            module.A_log.fill_(0.5 * seed)
            for y in got:
                y.fill_(torch.nan)
            graph.replay()
            assert_near(got, module(*other))


# --- modes ----------------------------------------------------------------------------------------


def test_autocast(device):
    """fp32 weights: the projections give bf16, KDA takes them as they are and is not cast."""
    module = layer(device, F32)
    x, state = rows(device, 2, 70, 1, F32)
    with torch.inference_mode(), torch.autocast(device, dtype=BF16):
        inputs = module.inputs(x)
        assert {y.dtype for y in inputs} == {BF16}
        o, final = module.kda(inputs, state)
        whole = module(x, state)
    with torch.inference_mode():
        want = module.kda(inputs, state)
    assert o.dtype == BF16
    assert final.dtype == F32
    assert_same((o, final), want)
    assert torch.equal(whole[1], want[1])


def test_modes_give_the_same_bits(device):
    call = make(device, lengths=LENGTHS, heads=3)
    with torch.no_grad():
        want = call.chunk_kda()
    assert_accurate(call, want)
    assert_same(call.chunk_kda(), want, "grad mode on, nothing asks for a gradient")
    with torch.inference_mode():
        got = call.chunk_kda()
        assert got[0].is_inference()
        assert_same(got, want, "inference mode")
        # Tensors made inside: outputs of one call are inputs of the next.
        again = call.but(initial_state=got[1]).chunk_kda()
    assert_same(call.but(initial_state=want[1]).chunk_kda(), again, "the next call")


@pytest.mark.parametrize("name", TENSORS)
def test_gradients_are_refused(device, name):
    call = make(device, lengths=LENGTHS, heads=2)
    with torch.no_grad():
        want = call.run()
    asking = call.but(**{name: getattr(call, name).clone().requires_grad_()})
    out, final = call.outputs()
    for refused in (lambda: asking.into(out, final), asking.chunk_kda):
        with pytest.raises(NotImplementedError, match=f"^{name}: .*requires_grad"):
            refused()
    assert bool(torch.isnan(out).all()), "something was written"
    with torch.no_grad():
        asking.into(out, final)
        assert_same((out, final), want, "grad mode off")
        assert not out.requires_grad


# --- the operator ---------------------------------------------------------------------------------


def operator_arguments(call: Call):
    """Of torch.ops.flash_kda.forward, for the call that fwd makes."""
    out, final = call.outputs()
    arrays = (
        call.q, call.k, call.v, call.g, call.beta, out, call.A_log, call.dt_bias,
        call.initial_state, final, None, None, call.cu_seqlens, None, None, None, None,
    )  # fmt: skip
    return (*arrays, _C.GATE_LOWER_BOUND, _C.BETA_LOGIT, True, -5.0, None, 0, True, False, 0)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["batch", "packed"])
def test_opcheck(device, lengths):
    from flash_kda import _torch  # noqa: F401 - defines the operator

    call = make(device, lengths=lengths, heads=2)
    arguments = operator_arguments(call)
    result = torch.library.opcheck(torch.ops.flash_kda.forward.default, arguments)
    assert set(result.values()) == {"SUCCESS"}, result


def test_operator_equals_the_call(device):
    from flash_kda import _torch  # noqa: F401 - defines the operator

    call = make(device, lengths=LENGTHS, heads=2)
    arguments = operator_arguments(call)
    torch.ops.flash_kda.forward(*arguments)
    assert_same((arguments[5], arguments[9]), call.run())


# --- rows that a GPU's copy engine cannot follow --------------------------------------------------


def shifted(x):
    """(buffer of sevens, view of it with the same values, 2 bytes off every boundary)."""
    buffer = torch.full((x.numel() + 9,), 7.0, dtype=x.dtype, device=x.device)
    view = buffer[1 : 1 + x.numel()].view(x.shape)
    view.copy_(x)
    return buffer, view


def misaligned(call):
    """q and g off the boundary, rows of k 132 elements apart, one head of v for all; and dense."""
    wide = torch.full((*call.k.shape[:3], D + 4), torch.nan, dtype=BF16, device=call.k.device)
    wide[..., :D] = call.k
    v = call.v[:, :, :1].expand(call.v.shape)
    rows = {"q": shifted(call.q)[1], "k": wide[..., :D], "v": v, "g": shifted(call.g)[1]}
    return call.but(**rows), call.but(v=v.contiguous())


def test_copies_are_made_of_what_needs_them(device):
    """The step that follows a refusal, by itself: on the CPU nothing is refused."""
    from flash_kda import _torch

    bad, good = misaligned(make(device, lengths=LENGTHS, heads=3, tail=5))
    good_out, good_final = good.outputs()
    good.into(good_out, good_final)
    arguments = list(operator_arguments(bad))
    buffer, arguments[5] = shifted(torch.full_like(good_out, 7.0))
    kept = [x.clone() for x in arguments[:5]]
    refusal = "q: expected an address aligned to 16 bytes on CUDA, got one that is 2 bytes past it"
    assert _torch.run_with_copies(tuple(arguments[:17]), tuple(arguments[17:]), refusal)
    end = sum(LENGTHS)
    assert_same((arguments[5][:, :end], arguments[9]), (good_out[:, :end], good_final))
    assert bool((arguments[5][:, end:] == 7).all()), "wrote past the last sequence"
    assert bool((buffer[0] == 7) & (buffer[-8:] == 7).all()), "wrote around out"
    for x, y in zip(arguments[:5], kept, strict=True):
        assert torch.equal(bits(x), bits(y)), "an input changed"
    refusal = "k: expected shape [B, T, H, K]"
    assert not _torch.run_with_copies(tuple(arguments[:17]), tuple(arguments[17:]), refusal)


def test_misaligned_rows_eager_compiled_and_captured(cuda):
    torch._dynamo.reset()
    call = make(cuda, lengths=LENGTHS, heads=3)
    bad, good = misaligned(call)
    want = good.chunk_kda()
    assert_accurate(good, want)
    assert_same(bad.chunk_kda(), want, "chunk_kda")
    assert_same(bad.run(), want, "fwd")
    narrow = bad.but(A_log=call.A_log.to(BF16), dt_bias=call.dt_bias.to(BF16))
    wide = good.but(A_log=narrow.A_log.float(), dt_bias=narrow.dt_bias.float())
    assert_same(narrow.run(), wide.run(), "parameters in bf16 too")
    compiled = torch.compile(Call.chunk_kda, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert_same(compiled(bad), want, "compiled")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = bad.chunk_kda()
    for x in got:
        x.fill_(torch.nan)
    graph.replay()
    assert_same(got, want, "replayed")


def test_what_stays_refused(cuda):
    """Copies mend alignment alone: an `out` whose elements overlap is still wrong."""
    call = make(cuda, lengths=LENGTHS, heads=3)
    out, final = call.outputs()
    with pytest.raises(ValueError, match=r"^out: "):
        call.into(out[:, :, :1].expand(out.shape), final)
    with pytest.raises(ValueError, match=r"^q: "):
        call.but(q=call.q.mT.contiguous().mT).into(out, final)
    assert bool(torch.isnan(out).all())


# --- streams, devices, memory ---------------------------------------------------------------------


def test_work_before_and_after_on_the_stream(cuda):
    """q is written before the call and overwritten after it, the outputs read and overwritten.

    The default stream holds long work all the while: whoever waited for it would be seen.
    """
    call = make(cuda, lengths=LENGTHS, heads=4)
    want = call.chunk_kda()
    late = call.but(q=torch.full_like(call.q, torch.nan))
    out, final = (torch.full_like(x, torch.nan) for x in want)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    busy(400)
    with torch.cuda.stream(stream):
        busy(30)
        late.q.copy_(call.q)
        late.chunk_kda(out=out, final_state=final)
        late.q.fill_(torch.nan)
        kept = out.clone(), final.clone()
        out.fill_(7.0)
        final.fill_(7.0)
    assert not stream.query(), "the host waited for the stream"
    stream.synchronize()
    assert not torch.cuda.default_stream().query(), "waited for the default stream"
    assert_same(kept, want)
    assert bool((out == 7).all())
    assert bool((final == 7).all())


def test_a_stream_of_another_library(cuda):
    """ExternalStream: only torch's notion of the current stream counts."""
    own = torch.cuda.Stream()
    call = make(cuda, lengths=LENGTHS)
    want = call.chunk_kda()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(own.cuda_stream)):
        busy(30)
        q = call.q.clone()
        got = call.but(q=q).chunk_kda()
    own.synchronize()
    assert_same(got, want)


def test_no_synchronisation(cuda):
    """torch's sync debug mode raises at what waits; with parameters that are widened too."""
    call = make(cuda, lengths=LENGTHS, heads=2)
    narrow = call.but(A_log=call.A_log.to(BF16), dt_bias=call.dt_bias.to(BF16))
    want = call.chunk_kda()
    narrow.chunk_kda()
    narrow.run()  # loading a kernel may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            busy(100)
            got = call.chunk_kda()
            narrow.chunk_kda()
            narrow.run()
            early = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert early, "the call waited for the device"
    torch.cuda.synchronize()
    assert_same(got, want)


def allocated(run, times=5):
    """(allocations, peak bytes) of `run` by torch's allocator; what it returns is freed."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert after["allocation.all.current"] == before["allocation.all.current"], "kept something"
    assert after["segment.all.allocated"] == before["segment.all.allocated"], "cudaMalloc"
    count = after["allocation.all.allocated"] - before["allocation.all.allocated"]
    peak = after["requested_bytes.all.peak"] - before["requested_bytes.all.current"]
    return count / times, peak


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_memory_is_outputs_and_workspace(cuda, lengths):
    """Nothing else is taken, and nothing kept."""
    call = make(cuda, lengths=lengths, heads=4, tokens=170)
    with torch.inference_mode():
        plan = flash_kda.plan_forward(
            call.q, call.k, call.v, call.g, call.beta, use_gate_in_kernel=True, lower_bound=-5.0,
            A_log=call.A_log, dt_bias=call.dt_bias, cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        workspace = plan.workspace_bytes
        slack = 512 if workspace else 0  # for alignment
        count, peak = allocated(call.chunk_kda)
        outputs = sum(x.numel() * x.element_size() for x in call.outputs())
        assert count == 2 + bool(workspace)
        assert outputs + workspace <= peak <= outputs + workspace + slack
        out, final = call.outputs()
        count, peak = allocated(lambda: call.into(out, final))
        assert count == bool(workspace)
        assert workspace <= peak <= workspace + slack


def test_several_devices(cuda):
    """Each call on its arrays' device and that device's stream, whichever is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    results = []
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        call = make(device, lengths=LENGTHS)
        stream = torch.cuda.Stream(device)
        torch.cuda.set_device(0)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):  # makes the device current
            busy(20)
            q = call.q.clone()
        torch.cuda.set_device(0)
        with torch.cuda.device(0), torch.cuda.stream(stream):
            torch.cuda.set_device(0)  # current again; the stream stays that of its device
            got = call.but(q=q).chunk_kda()
            assert torch.cuda.current_device() == 0
        stream.synchronize()
        assert got[0].device == torch.device(device)
        results.append([x.cpu() for x in got])
    torch.cuda.set_device(0)
    for other in results[1:]:
        assert_same(other, results[0])


def test_arguments_on_two_devices(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    call = make("cuda:0", lengths=LENGTHS)
    with pytest.raises(ValueError, match=r"^k: "):
        call.but(k=call.k.to("cuda:1")).chunk_kda()
    assert_accurate(call, call.chunk_kda())


def test_threads(cuda):
    """Host threads, each on a stream of its own, share the module's caches."""
    from concurrent.futures import ThreadPoolExecutor

    calls = [make(cuda, lengths=LENGTHS[i:] + LENGTHS[:i], heads=2 + i, seed=i) for i in range(4)]
    want = [call.chunk_kda() for call in calls]
    torch.cuda.synchronize()

    def work(i):
        stream = torch.cuda.Stream()
        wrong = 0
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(50):
                got = calls[i].chunk_kda()
                wrong += sum((bits(a) != bits(b)).sum() for a, b in zip(got, want[i], strict=True))
            return int(wrong)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0] * 4
