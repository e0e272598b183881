"""The GPU through torch: streams, graphs, memory, isolation, layouts, and what is not served.

Accuracy on the GPU is test_inputs.py's and test_exact.py's business; here results are compared bit
for bit with the same work done in another way. What holds on every device runs on the CPU too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flash_kda  # noqa: E402
from flash_kda.metrics import relative_rms  # noqa: E402
from flash_kda.reference import recurrent_kda  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32
D = 128
BETA_PITCH = 6288  # a row of one fused projection: four blocks of 12 x 128 columns, beta, and more


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@dataclasses.dataclass
class Call:
    """Arguments of `flash_kda.fwd`; outputs are made and poisoned for each call."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    initial_state: Any
    cu_seqlens: Any
    sequences: int

    def but(self, **changes):
        return dataclasses.replace(self, **changes)

    def outputs(self, final_dtype=F32):
        """Poisoned: out as v, final state [N, H, V, K]."""
        out = torch.full(self.v.shape, torch.nan, dtype=self.v.dtype, device=self.v.device)
        shape = (self.sequences, self.v.shape[2], D, D)
        return out, torch.full(shape, torch.nan, dtype=final_dtype, device=self.v.device)

    def into(self, out, final, lower_bound=-5.0):
        flash_kda.fwd(
            self.q, self.k, self.v, self.g, self.beta, None, out, self.A_log, self.dt_bias,
            lower_bound, self.initial_state, final, self.cu_seqlens,
        )  # fmt: skip

    def run(self, final_dtype=F32):
        out, final = self.outputs(final_dtype)
        self.into(out, final)
        return out, final

    def chunk_kda(self, **more):
        """The same call by keywords."""
        options = {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "lower_bound": -5.0,
            "state_v_first": True,
            "output_final_state": True,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "initial_state": self.initial_state,
            "cu_seqlens": self.cu_seqlens,
        }
        return flash_kda.chunk_kda(self.q, self.k, self.v, self.g, self.beta, **options | more)


def make(device, *, lengths=None, batch=1, tokens=96, heads=2, seed=0, tail=0, index=torch.int64):
    """Random arguments with data of its own in each head; `lengths` packs, `tail` rows follow."""
    rng = torch.Generator().manual_seed(seed)
    sequences = batch
    if lengths is not None:
        batch, tokens, sequences = 1, sum(lengths) + tail, len(lengths)

    def normal(*shape, dtype=BF16, scale=1.0):
        return (torch.randn(*shape, generator=rng) * scale).to(dtype).to(device)

    rows = (batch, tokens, heads, D)
    cu = None if lengths is None else torch.tensor(np.cumsum([0, *lengths])).to(index).to(device)
    return Call(
        q=normal(*rows),
        k=normal(*rows),
        v=normal(*rows),
        g=normal(*rows),
        beta=normal(*rows[:3]),
        A_log=torch.rand(heads, generator=rng).mul(0.5).to(device),
        dt_bias=normal(heads, D, dtype=F32, scale=0.1),
        initial_state=normal(sequences, heads, D, D, dtype=F32),
        cu_seqlens=cu,
        sequences=sequences,
    )


def bits(x):
    """The bit patterns: NaN equals itself."""
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def assert_same(got, want, what=""):
    for name, a, b in zip(("out", "final state"), got, want, strict=True):
        assert not torch.isnan(b.float()).any(), f"{what}: {name} of the reference holds NaN"
        differ = int((bits(a) != bits(b)).sum())
        assert same(a, b), f"{what}: {name}: {differ} of {b.numel()} elements differ"


def assert_accurate(call, got):
    """Against the recurrence in fp64, by head: results that are compared have the right values."""
    arrays = [x.float().cpu().numpy() for x in (call.q, call.k, call.v, call.g, call.beta)]
    o, final, *_ = recurrent_kda(
        *arrays,
        A_log=call.A_log.cpu().numpy(),
        dt_bias=call.dt_bias.cpu().numpy(),
        initial_state=call.initial_state.cpu().numpy(),
        cu_seqlens=None if call.cu_seqlens is None else call.cu_seqlens.cpu().numpy(),
    )
    end = call.v.shape[1] if call.cu_seqlens is None else int(call.cu_seqlens[-1])
    out = got[0].float().cpu().numpy()[:, :end]
    assert (relative_rms(out, o[:, :end], (0, 1, 3)) <= 1e-2).all()
    assert (relative_rms(got[1].float().cpu().numpy(), final, (0, 2, 3)) <= 1e-2).all()


# --- isolation and layouts: on every device -------------------------------------------------------


def test_batch_equals_single(device):
    call = make(device, batch=3, tokens=101, heads=3)
    got = call.run()
    assert_accurate(call, got)
    for b in range(3):
        rows = {n: getattr(call, n)[b : b + 1] for n in ("q", "k", "v", "g", "beta")}
        alone = call.but(**rows, initial_state=call.initial_state[b : b + 1], sequences=1)
        assert_same((got[0][b : b + 1], got[1][b : b + 1]), alone.run(), f"row {b}")


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_equals_single(device, index):
    lengths = [1, 31, 32, 33, 0, 64, 100, 200, 7]
    call = make(device, lengths=lengths, heads=2, index=index)
    got = call.run()
    assert_accurate(call, got)
    start = 0
    for n, length in enumerate(lengths):
        rows = {
            name: getattr(call, name)[:, start : start + length]
            for name in ("q", "k", "v", "g", "beta")
        }
        state = call.initial_state[n : n + 1]
        alone = call.but(**rows, initial_state=state, cu_seqlens=None, sequences=1).run()
        part = (got[0][:, start : start + length], got[1][n : n + 1])
        assert_same(part, alone, f"sequence {n} of {length} tokens")
        start += length


def test_many_sequences_equal_single(device):
    """More items than multiprocessors: blocks take them as they get free."""
    lengths = [(37 * i) % 150 for i in range(90)]
    call = make(device, lengths=lengths, heads=4, seed=3)
    got = call.run()
    assert_accurate(call, got)
    offsets = np.cumsum([0, *lengths])
    for n in (0, 1, 44, 88, 89):
        span = slice(int(offsets[n]), int(offsets[n + 1]))
        rows = {name: getattr(call, name)[:, span] for name in ("q", "k", "v", "g", "beta")}
        state = call.initial_state[n : n + 1]
        alone = call.but(**rows, initial_state=state, cu_seqlens=None, sequences=1).run()
        assert_same((got[0][:, span], got[1][n : n + 1]), alone, f"sequence {n}")


def test_heads_equal_single(device):
    call = make(device, lengths=[70, 50], heads=5)
    got = call.run()
    for h in (0, 2, 4):
        rows = {n: getattr(call, n)[:, :, h : h + 1] for n in ("q", "k", "v", "g", "beta")}
        rest = {n: getattr(call, n)[h : h + 1] for n in ("A_log", "dt_bias")}
        alone = call.but(**rows, **rest, initial_state=call.initial_state[:, h : h + 1]).run()
        assert_same((got[0][:, :, h : h + 1], got[1][:, h : h + 1]), alone, f"head {h}")


def test_state_in_place(device):
    call = make(device, lengths=[100, 0, 64], heads=2)
    want = call.run()
    state = call.initial_state.clone()
    out, _ = call.outputs()
    call.but(initial_state=state).into(out, state)
    assert_same((out, state), want, "in place")


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, BF16), (BF16, BF16)])
def test_state_dtypes(device, dtypes):
    """A bf16 state is an fp32 one rounded at the edges of the call."""
    call = make(device, lengths=[100, 64], heads=2)
    call = call.but(initial_state=call.initial_state.to(BF16).to(F32))
    want = call.run()
    given = call.but(initial_state=call.initial_state.to(dtypes[0]))
    assert_same(given.run(dtypes[1]), (want[0], want[1].to(dtypes[1])), str(dtypes))


def fused(call):
    """The same values as column blocks of one projection: row pitch of 6288 elements."""
    heads = call.q.shape[2]
    tokens = call.q.shape[1]
    wide = torch.full((1, tokens, BETA_PITCH), torch.nan, dtype=BF16, device=call.q.device)
    views = {}
    for i, name in enumerate(("q", "k", "v", "g")):
        view = wide[:, :, i * heads * D : (i + 1) * heads * D].unflatten(-1, (heads, D))
        view.copy_(getattr(call, name))
        views[name] = view
    first = 4 * heads * D
    views["beta"] = wide[:, :, first : first + heads]
    views["beta"].copy_(call.beta)
    return call.but(**views), wide


def test_fused_projection(device):
    call = make(device, lengths=[100, 33], heads=12)
    want = call.run()
    views, wide = fused(call)
    before = wide.clone()
    assert_same(views.run(), want, "column blocks")
    assert torch.equal(bits(wide), bits(before)), "an input changed"


def test_strided_outputs(device):
    call = make(device, lengths=[100, 33], heads=2)
    want = call.run()
    wide = torch.full((1, 133, 5, 160), 7.0, dtype=BF16, device=device)
    out = wide[:, :, 1:3, 16:144]
    pool = torch.full((2, 4, D, 136), 7.0, device=device)
    final = pool[:, 1:3, :, :D]
    call.into(out, final)
    assert_same((out, final), want, "strided outputs")
    out.fill_(7.0)
    final.fill_(7.0)
    assert bool((wide == 7).all()), "wrote around out"
    assert bool((pool == 7).all()), "wrote around final_state"


def test_batch_and_head_strides(device):
    call = make(device, batch=2, tokens=70, heads=3)
    want = call.run()

    def heads_first(x):  # [B, H, T, D] memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    changed = {n: heads_first(getattr(call, n)) for n in ("q", "k", "v", "g")}
    assert_same(call.but(**changed).run(), want, "head before token")


def test_empty_sequences(device):
    call = make(device, lengths=[0, 0, 5, 0, 70, 0], heads=2)
    out, final = call.run()
    assert_accurate(call, (out, final))
    for n in (0, 1, 3, 5):
        assert torch.equal(bits(final[n]), bits(call.initial_state[n])), f"sequence {n}"
    _, final = call.but(initial_state=None).run()
    assert not final[[0, 1, 3, 5]].any()
    assert not torch.isnan(final).any()


@pytest.mark.parametrize("packed", [False, True])
def test_no_tokens(device, packed):
    lengths = [0, 0, 0] if packed else None
    call = make(device, lengths=lengths, batch=3, tokens=0, heads=2)
    out, final = call.run()
    assert out.numel() == 0
    assert torch.equal(bits(final), bits(call.initial_state))
    _, final = call.but(initial_state=None).run()
    assert not final.any()
    assert not torch.isnan(final).any()


def test_no_sequences(device):
    call = make(device, lengths=[], tail=5, heads=2)
    out, final = call.run()
    assert bool(torch.isnan(out).all()), "a row at or past cu_seqlens[-1] was written"
    assert final.numel() == 0


def test_rows_past_the_end(device):
    lengths, tail = [70, 37], 50
    call = make(device, lengths=lengths, heads=2, tail=tail)
    end = sum(lengths)
    cut = {n: getattr(call, n)[:, :end].contiguous() for n in ("q", "k", "v", "g", "beta")}
    want = call.but(**cut).run()
    for name in cut:
        getattr(call, name)[:, end:] = torch.nan
    out, final = call.run()
    assert_same((out[:, :end], final), want, "with rows after the last sequence")
    fresh = call.outputs()[0]
    assert torch.equal(bits(out[:, end:]), bits(fresh[:, end:])), "wrote past the end"


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_neighbours(device, name, value):
    """One bad element in sequence 1, head 1: all other pairs bit for bit as without it."""
    lengths = [40, 60, 64]
    call = make(device, lengths=lengths, heads=3)
    want = call.run()
    bad = getattr(call, name).clone()
    if name == "initial_state":
        bad[1, 1, 5, 9] = value
    else:
        bad[(0, 40 + 33, 1, 7) if bad.dim() == 4 else (0, 40 + 33, 1)] = value
    out, final = call.but(**{name: bad}).run()
    for n, (start, end) in enumerate([(0, 40), (40, 100), (100, 164)]):
        for h in range(3):
            if (n, h) == (1, 1):
                continue
            assert_same(
                (out[:, start:end, h], final[n, h]),
                (want[0][:, start:end, h], want[1][n, h]),
                f"sequence {n}, head {h}",
            )


# --- the GPU alone --------------------------------------------------------------------------------


def busy(milliseconds):
    """Queues work that keeps the current stream busy for about so long."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))  # clocks of about 1.5 GHz


def queue_filler(size=1024):
    """Queues work of another kind."""
    x = torch.ones(size, size, device="cuda", dtype=BF16)
    return x @ x


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [([300], 3), ([150, 1, 0, 90], 2), ([(29 * i) % 97 for i in range(60)], 4)],
    ids=["one sequence", "packed", "more items than multiprocessors"],
)
def test_graph_replay(cuda, lengths, heads):
    """New contents, new cu_seqlens of the same N, poisoned outputs; replays equal eager calls."""
    call = make(cuda, lengths=lengths, heads=heads, seed=1)
    other = make(cuda, lengths=lengths[::-1], heads=heads, seed=2)
    want = [call.run(), other.run()]
    assert_accurate(other, want[1])
    kept = call.but(**{
        f.name: getattr(call, f.name).clone()
        for f in dataclasses.fields(call)
        if f.name != "sequences"
    })  # fmt: skip
    out, final = kept.outputs()
    kept.into(out, final)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept.into(out, final)
    for r in range(20):
        source = (call, other)[r % 2]
        for f in dataclasses.fields(kept):
            if f.name != "sequences":
                getattr(kept, f.name).copy_(getattr(source, f.name))
        out.fill_(torch.nan)
        final.fill_(torch.nan)
        graph.replay()
        assert_same((out, final), want[r % 2], f"replay {r}")


def test_graph_of_in_place_steps(cuda):
    """A state carried in place: a graph replayed three times equals three calls."""
    call = make(cuda, tokens=64, heads=2)
    state = call.initial_state.clone()
    for _ in range(3):
        out, final = call.but(initial_state=state).run()
        state = final
    carried = call.initial_state.clone()
    step = call.but(initial_state=carried)
    graph_out, _ = call.outputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.into(graph_out, carried)
    for _ in range(3):
        graph.replay()
    assert_same((graph_out, carried), (out, final), "third replay")


def test_two_streams(cuda, full):
    """T22: two inputs by turns on two streams, other work between; every round the same bits."""
    calls = [
        make(cuda, lengths=lengths, heads=12, seed=seed)
        for seed, lengths in (
            (4, [1238, 1199, 1240, 1216, 1187, 1203, 909]),
            (5, [909, 1250, 6033]),
        )
    ]
    want = [call.run() for call in calls]
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = [call.outputs() for call in calls]
    wrong = torch.zeros(2, dtype=torch.int64, device=cuda)
    torch.cuda.synchronize()
    for r in range(1000 if full else 200):
        which = r % 2
        with torch.cuda.stream(streams[which]):
            for x in outputs[which]:
                x.fill_(torch.nan)
            if r % 3 == 0:
                queue_filler()
            calls[which].into(*outputs[which])
            for x, y in zip(outputs[which], want[which], strict=True):
                wrong[which] += (bits(x) != bits(y)).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0], "elements that differed in some round"


def test_one_call_at_once_on_two_streams(cuda):
    """The same inputs on both streams at once: nothing is shared behind the caller's back."""
    call = make(cuda, lengths=[(31 * i) % 140 for i in range(70)], heads=4)
    want = call.run()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = [call.outputs() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, pair in zip(streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                call.into(*pair)
        torch.cuda.synchronize()
        for pair in outputs:
            assert_same(pair, want)
            for x in pair:
                x.fill_(torch.nan)
        torch.cuda.synchronize()


@pytest.mark.parametrize("lengths", [None, [100, 0, 33], [(29 * i) % 97 for i in range(60)]])
def test_value_split(cuda, lengths):
    """Blocks that share a head by columns of V change no bit."""
    call = make(cuda, lengths=lengths, tokens=170, heads=3)
    results = []
    for split in (1, 2):
        plan = flash_kda.plan_forward(
            call.q, call.k, call.v, call.g, call.beta, use_gate_in_kernel=True, lower_bound=-5.0,
            A_log=call.A_log, dt_bias=call.dt_bias, cu_seqlens=call.cu_seqlens, value_split=split,
        )  # fmt: skip
        assert plan.value_split == split
        out, final = call.outputs()
        call.chunk_kda(value_split=split, out=out, final_state=final)
        results.append((out, final))
    assert_same(results[1], results[0], "value_split 2")
    assert_same(call.run(), results[0], "value_split chosen")


def test_the_callers_stream(cuda):
    """Work is ordered after what the caller's stream holds, whatever the default stream does."""
    call = make(cuda, lengths=[100, 33], heads=2)
    want = call.run()
    late = call.but(q=torch.zeros_like(call.q))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy(20)
        late.q.copy_(call.q)
        got = late.run()
    stream.synchronize()
    assert_same(got, want)


def test_no_host_synchronisation(cuda):
    """The call returns while earlier work on its stream still runs."""
    call = make(cuda, lengths=[100, 33], heads=2)
    want = call.run()
    outputs = call.outputs()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy(200)
        call.into(*outputs)
        returned_early = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert returned_early, "the call waited for the device"
    assert_same(outputs, want)


@pytest.mark.parametrize("lengths", [[300], [(29 * i) % 97 for i in range(60)]])
def test_no_allocation_but_the_workspace(cuda, lengths):
    """By torch's count; that none goes past torch is shown by capture, which forbids cudaMalloc."""
    call = make(cuda, lengths=lengths, heads=4)
    outputs = call.outputs()
    plan = flash_kda.plan_forward(
        call.q, call.k, call.v, call.g, call.beta, use_gate_in_kernel=True, lower_bound=-5.0,
        A_log=call.A_log, dt_bias=call.dt_bias, cu_seqlens=call.cu_seqlens,
    )  # fmt: skip
    call.into(*outputs)  # the first call loads kernels
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(10):
        call.into(*outputs)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    taken = after["allocation.all.allocated"] - before["allocation.all.allocated"]
    assert taken == (10 if plan.workspace_bytes else 0)
    assert after["allocation.all.current"] == before["allocation.all.current"]
    assert plan.workspace_bytes <= 64 << 20


def test_inputs_unchanged(cuda):
    call = make(cuda, lengths=[100, 0, 33], heads=2)
    tensors = [x for x in vars(call).values() if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    call.run()
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize(
    "offsets",
    [[0, 200, 100, 133], [-50, 60, 133], [0, 133, 1 << 30], [5, 5, 5], [133, 0, 133], [-9, -5, -1]],
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_garbage_cu_seqlens_stays_inside(cuda, offsets, index):
    """Whatever the offsets hold, nothing outside out and the final state is touched."""
    call = make(cuda, lengths=[133] + [0] * (len(offsets) - 2), heads=2)
    call = call.but(cu_seqlens=torch.tensor(offsets, dtype=index, device=cuda))
    wide = torch.full((3, 133, 2, D), 7.0, dtype=BF16, device=cuda)
    states = torch.full((3, call.sequences, 2, D, D), 7.0, device=cuda)
    call.into(wide[1:2], states[1])
    torch.cuda.synchronize()
    assert bool((wide[[0, 2]] == 7).all()), "wrote around out"
    assert bool((states[[0, 2]] == 7).all()), "wrote around final_state"
    good = make(cuda, lengths=[100, 33], heads=2)
    assert_accurate(good, good.run())


def test_checked_cu_seqlens(cuda):
    call = make(cuda, lengths=[100, 33], heads=2)
    call.chunk_kda(check_cu_seqlens=True)
    bad = torch.tensor([0, 200, 133], device=cuda)
    with pytest.raises(ValueError, match="cu_seqlens"):
        call.but(cu_seqlens=bad).chunk_kda(check_cu_seqlens=True)


def offset_copy(x, lead):
    """The same values, `lead` elements into a buffer."""
    buffer = torch.full((lead + x.numel() + 8,), torch.nan, dtype=x.dtype, device=x.device)
    view = buffer[lead : lead + x.numel()].view(x.shape)
    view.copy_(x)
    return view


def odd_pitch_copy(x):
    """The same values, rows a few elements further apart than the copy engine can follow."""
    wide = torch.full((*x.shape[:3], D + 4), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., :D] = x
    return wide[..., :D]


@pytest.mark.parametrize(
    "how", [lambda x: offset_copy(x, 1), odd_pitch_copy], ids=["base", "pitch"]
)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "out"])
def test_misaligned_rows(cuda, name, how):
    """Rows that the copy engine cannot follow are copied first; outputs are copied back."""
    call = make(cuda, lengths=[100, 33], heads=2)
    want = call.run()
    out, final = call.outputs()
    if name == "out":
        out = how(out)
        call.into(out, final)
    else:
        call.but(**{name: how(getattr(call, name))}).into(out, final)
    assert_same((out, final), want, name)


@pytest.mark.parametrize("name", ["beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"])
def test_any_alignment_elsewhere(cuda, name):
    call = make(cuda, lengths=[100, 33], heads=2)
    want = call.run()
    source = getattr(call, name)
    buffer = torch.zeros(source.numel() + 9, dtype=source.dtype, device=cuda)
    moved = buffer[1 : 1 + source.numel()].view(source.shape)
    moved.copy_(source)
    assert_same(call.but(**{name: moved}).run(), want, f"{name} one element in")


def test_final_state_of_any_alignment(cuda):
    call = make(cuda, lengths=[100, 33], heads=2)
    for dtype in (F32, BF16):
        out, final = call.outputs(dtype)
        call.into(out, final)
        moved = offset_copy(torch.full_like(final, torch.nan), 1)
        call.into(out, moved)
        assert_same((out, moved), (out, final), str(dtype))


def reshaped(call, heads, value_heads, dim):
    """Random arguments of other head counts or head size."""
    rng = torch.Generator().manual_seed(9)

    def normal(*shape, dtype=BF16):
        return torch.randn(*shape, generator=rng).to(dtype).cuda()

    tokens, n = call.q.shape[1], call.sequences
    return call.but(
        q=normal(1, tokens, heads, dim),
        k=normal(1, tokens, heads, dim),
        v=normal(1, tokens, value_heads, dim),
        g=normal(1, tokens, value_heads, dim),
        beta=normal(1, tokens, value_heads),
        A_log=normal(value_heads, dtype=F32),
        dt_bias=normal(value_heads, dim, dtype=F32),
        initial_state=normal(n, value_heads, dim, dim, dtype=F32),
    )


def slots(*values):
    return torch.tensor(values, device="cuda")


# What the kernels do not serve yet: a change here is news for the change log.
UNSERVED = {
    "K 64": ("K = 64", lambda c: reshaped(c, 2, 2, 64).chunk_kda()),
    "softplus gate": ("gate", lambda c: c.chunk_kda(lower_bound=None)),
    "log decay": (
        "gate",
        lambda c: c.but(g=-c.g.abs(), A_log=None, dt_bias=None).chunk_kda(
            use_gate_in_kernel=False, lower_bound=None
        ),
    ),
    "fp16": (
        "q: expected bfloat16",
        lambda c: c.but(q=c.q.half(), k=c.k.half(), v=c.v.half()).chunk_kda(),
    ),
    "fp32 g": ("g of type float32", lambda c: c.but(g=c.g.float()).chunk_kda()),
    "initial pool": (
        "initial_state_indices",
        lambda c: c.chunk_kda(initial_state_indices=slots(1, 0)),
    ),
    "final pool": (
        "final_state_indices",
        lambda c: c.chunk_kda(
            final_state=torch.zeros_like(c.initial_state), final_state_indices=slots(1, 0)
        ),
    ),
    "checkpoints": (
        "checkpoint",
        lambda c: c.chunk_kda(
            checkpoint_states=torch.zeros_like(c.initial_state),
            checkpoint_sequences=slots(0),
            checkpoint_positions=slots(64),
            checkpoint_slots=slots(1),
        ),
    ),
    "value_split 3": ("value_split", lambda c: c.chunk_kda(value_split=3)),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_not_served(cuda, name):
    words, run = UNSERVED[name]
    call = make(cuda, lengths=[100, 33], heads=2)
    want = call.run()
    with pytest.raises(NotImplementedError, match=words):
        run(call)
    assert_same(call.run(), want, "a good call afterwards")


def test_arrays_on_both_sides(cuda):
    call = make(cuda, tokens=33)
    with pytest.raises(ValueError, match=r"^k: "):
        call.but(k=call.k.cpu()).run()
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        call.but(cu_seqlens=torch.tensor([0, 33])).run()
    assert_accurate(call, call.run())


def test_another_current_device(cuda):
    """The arrays' device is made current and the caller's comes back."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    call = make("cuda:1", lengths=[100, 33])
    torch.cuda.set_device(0)
    got = call.run()
    assert torch.cuda.current_device() == 0
    here = make("cuda:0", lengths=[100, 33]).run()
    assert_same([x.cpu() for x in got], [x.cpu() for x in here])
