"""Long sequences of few heads, cut into segments on the GPU.

Accuracy is against the recurrence in fp64, with the split and without; everything else is bit for
bit: what a sequence gets may depend on its length and the number of heads, and on nothing beside
it. Every test shows first that its call is cut. Heads of 4 and 2048 tokens are, on any card that is
served.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flash_kda  # noqa: E402
from flash_kda.metrics import relative_rms  # noqa: E402
from flash_kda.reference import recurrent_kda  # noqa: E402
from test_cuda import BF16, F32, D, assert_same, bits, make, queue_filler, same  # noqa: E402

HEADS = 4
LONG = 2048
ROWS = ("q", "k", "v", "g", "beta")
ORDINARY, STRESS, CANCELLING = (5e-3, 5e-3), (1e-2, 1e-2), (5e-2, 8e-2)  # out, state


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def options(call, lower_bound=-5.0, **more):
    return {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": lower_bound,
        "state_v_first": True,
        "output_final_state": True,
        "A_log": call.A_log,
        "dt_bias": call.dt_bias,
        "initial_state": call.initial_state,
        "cu_seqlens": call.cu_seqlens,
        **more,
    }


def plan_of(call, **more):
    return flash_kda.plan_forward(*(getattr(call, n) for n in ROWS), **options(call, **more))


def run(call, final_dtype=F32, **more):
    """One call into poisoned outputs, its workspace poisoned and guarded."""
    out, final = call.outputs(final_dtype)
    arguments = options(call, **more) | {"out": out, "final_state": final}
    with poisoned_workspace(plan_of(call, **more).workspace_bytes):
        flash_kda.chunk_kda(*(getattr(call, n) for n in ROWS), **arguments)
    return out, final


def assert_cut(call, **more):
    plan = plan_of(call, **more)
    assert plan.sequence_segments > 1, plan.describe()
    assert plan.workspace_bytes > 0
    return plan


def workspace_size(workspace_bytes):
    """What the binding asks the allocator for: room to align by itself."""
    return workspace_bytes + 255


@contextmanager
def poisoned_workspace(workspace_bytes, guard=32 << 20):
    """A call within takes its workspace out of memory that holds NaN (-1 as integers).

    It lies in a pool of its own with `guard` bytes right behind it, which must stay as they are.
    """
    if workspace_bytes == 0:
        yield
        return
    size = workspace_size(workspace_bytes)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        room = torch.empty(size + guard + (4 << 20), dtype=torch.uint8, device="cuda")
        base = room.data_ptr()
        del room  # the pool keeps it as one block, of which the next two are taken in order
        place = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        behind = torch.full((guard,), 255, dtype=torch.uint8, device="cuda")
        assert place.data_ptr() == base, "the pool did not serve the workspace's place"
        assert 0 <= behind.data_ptr() - base - size < 1024, "the guard is not behind it"
        del place
        yield
        used = torch.empty(size, dtype=torch.uint8, device="cuda")
        assert used.data_ptr() == base
        assert bool((used != 255).any()), "the call's workspace was elsewhere"
        assert bool((behind == 255).all()), "the call wrote behind its workspace"
        del used, behind


def oracle(call, lower_bound=-5.0, heads=None):
    """The fp64 recurrence's out [B, T, heads, V] and final state [N, heads, V, K]."""
    arrays = [getattr(call, n).float().cpu().numpy() for n in ROWS]

    def host(x):
        return None if x is None else x.float().cpu().numpy()

    return recurrent_kda(
        *arrays,
        A_log=host(call.A_log),
        dt_bias=host(call.dt_bias),
        lower_bound=lower_bound,
        initial_state=host(call.initial_state),
        cu_seqlens=None if call.cu_seqlens is None else call.cu_seqlens.cpu().numpy(),
        heads=heads,
    )[:2]


def assert_close(call, got, want, bounds, what):
    """By sequence and head."""
    out, final = (x.float().cpu().numpy() for x in got)
    if call.cu_seqlens is None:
        spans = [(n, slice(None)) for n in range(call.sequences)]
    else:
        spans = [(0, slice(a, b)) for a, b in pairwise(call.cu_seqlens.tolist())]
    errors = np.zeros((2, call.sequences, out.shape[2]))
    for n, (row, span) in enumerate(spans):
        errors[0, n] = relative_rms(out[row, span], want[0][row, span], (0, 2))
    errors[1] = relative_rms(final, want[1], (2, 3))
    worst = errors.max(axis=(1, 2))
    print(f"{what}: out {worst[0]:.2e}, state {worst[1]:.2e}")
    assert worst[0] <= bounds[0], f"{what}: out {errors[0]}"
    assert worst[1] <= bounds[1], f"{what}: state {errors[1]}"


def part(call, n):
    """Sequence n of a packed call, as a batch of one."""
    start, end = call.cu_seqlens[n].item(), call.cu_seqlens[n + 1].item()
    rows = {name: getattr(call, name)[:, start:end] for name in ROWS}
    state = None if call.initial_state is None else call.initial_state[n : n + 1]
    return call.but(**rows, initial_state=state, cu_seqlens=None, sequences=1)


def part_of(call, got, n):
    """What a packed call got for sequence n."""
    start, end = call.cu_seqlens[n].item(), call.cu_seqlens[n + 1].item()
    return got[0][:, start:end], got[1][n : n + 1]


def slow(call, value=-8.0):
    """Raw gates so low that what a segment leaves behind counts to the end."""
    return call.but(
        g=torch.full_like(call.g, value),
        A_log=torch.zeros_like(call.A_log),
        dt_bias=torch.zeros_like(call.dt_bias),
    )


# --- accuracy -------------------------------------------------------------------------------------


def identical_keys(device):
    """T1: one key row for each head under full writes and hardly any decay; q = k."""
    call = slow(make(device, tokens=4096, heads=HEADS), -12.0)
    keys = call.k[:, :1].expand_as(call.k).contiguous()
    v = call.v[:, torch.arange(4096) % 16].contiguous()
    return call.but(q=keys, k=keys.clone(), v=v, beta=torch.full_like(call.beta, 8.0))


def near_keys(device):
    """Keys of cosine 0.95 under full writes and hardly any decay."""
    call = identical_keys(device)
    rng = torch.Generator().manual_seed(7)
    shared = torch.nn.functional.normalize(torch.randn(1, 1, HEADS, D, generator=rng), dim=-1)
    own = torch.randn(1, 4096, HEADS, D, generator=rng)
    own = torch.nn.functional.normalize(own - (own * shared).sum(-1, keepdim=True) * shared, dim=-1)
    keys = (D**0.5 * (0.95**0.5 * shared + 0.05**0.5 * own)).to(BF16).to(device)
    return call.but(q=keys, k=keys.clone())


def saturated_gates(device):
    """By head: at the bound; even channels; sixteen tokens by turns; no decay."""
    call = slow(make(device, tokens=LONG, heads=HEADS), -60.0)
    g = call.g
    g[:, :, 0] = 20
    g[:, :, 1, ::2] = 20
    g[:, (torch.arange(LONG) // 16 % 2 == 0).to(device), 2] = 20
    return call


def weak_writes(device, tokens=LONG):
    call = make(device, tokens=tokens, heads=HEADS)
    return call.but(beta=call.beta - 3)


def slow_decay(device):
    return slow(weak_writes(device, 16384), -10.0)


def extreme_norms(device):
    """By head: rows of q and k tiny; huge; some zero; ordinary."""
    call = make(device, tokens=LONG, heads=HEADS)
    for x in (call.q, call.k):
        x[:, :, 0] *= 1e-4
        x[:, :, 1] *= 1e15
    call.k[:, ::5, 2] = 0
    call.q[:, ::7, 2] = 0
    return call


def packed_lengths(device):
    return make(device, lengths=[LONG + 5, 0, 1, 333, 3 * LONG, 64], heads=HEADS, tail=20)


INPUTS = {
    "ordinary": (lambda d: make(d, tokens=LONG, heads=HEADS), -5.0, ORDINARY),
    "ordinary, batch": (lambda d: make(d, batch=2, tokens=LONG + 17, heads=HEADS), -5.0, ORDINARY),
    "ordinary, packed": (packed_lengths, -5.0, STRESS),  # the single token among them
    "identical keys": (identical_keys, -5.0, CANCELLING),
    "keys of cosine 0.95": (near_keys, -5.0, STRESS),
    "saturated gates": (saturated_gates, -5.0, STRESS),
    "no decay": (weak_writes, 0.0, STRESS),
    "almost no decay": (weak_writes, -1e-3, STRESS),
    "slow decay": (slow_decay, -5.0, STRESS),
    "extreme norms": (extreme_norms, -5.0, STRESS),
}
# Decay as fast as in the others may leave nothing of a segment's state to differ by.
REMEMBER = ("identical keys", "keys of cosine 0.95", "no decay", "almost no decay", "slow decay")


@pytest.mark.parametrize("name", INPUTS)
def test_accuracy(cuda, name):
    """With the split and without: the same bounds."""
    build, lower_bound, bounds = INPUTS[name]
    call = build(cuda)
    assert_cut(call, lower_bound=lower_bound)
    want = oracle(call, lower_bound)
    split = run(call, lower_bound=lower_bound)
    assert_close(call, split, want, bounds, f"{name}, split")
    whole = run(call, lower_bound=lower_bound, sequence_split=False)
    assert_close(call, whole, want, bounds, f"{name}, in one piece")
    if name in REMEMBER:
        assert not same(split[0], whole[0]), "the same bits: was it split?"
    tail = call.v.shape[1] if call.cu_seqlens is None else int(call.cu_seqlens[-1])
    assert bool(torch.isnan(split[0][:, tail:]).all()), "a row past the last sequence was written"


def test_the_plan_says_so(cuda):
    call = make(cuda, tokens=LONG, heads=HEADS)
    plan = assert_cut(call)
    assert f"{plan.sequence_segments} segments" in plan.reason
    assert plan.multiprocessors > 0
    off = plan_of(call, sequence_split=False)
    assert off.sequence_segments == 1
    assert off.workspace_bytes == 0
    assert "as asked" in off.reason
    assert plan_of(make(cuda, tokens=LONG, heads=64)).sequence_segments == 1


def test_more_value_heads_than_key_heads(cuda):
    call = make(cuda, tokens=LONG, heads=HEADS)
    call = slow(call.but(q=call.q[:, :, :2].contiguous(), k=call.k[:, :, :2].contiguous()))
    assert_cut(call)
    got = run(call)
    assert_close(call, got, oracle(call), STRESS, "4 value heads, 2 key heads")
    assert not same(got[0], run(call, sequence_split=False)[0])
    wide = {n: getattr(call, n).repeat_interleave(2, 2) for n in ("q", "k")}
    assert_same(run(call.but(**wide)), got, "the same key heads, written out")


# --- bit for bit ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, [LONG, 70, 3 * LONG]])
def test_value_split_changes_nothing(cuda, lengths):
    call = slow(make(cuda, lengths=lengths, tokens=LONG, heads=HEADS))
    assert_cut(call)
    one, two = (run(call, value_split=n) for n in (1, 2))
    assert_same(two, one, "two blocks a head")
    assert_same(run(call), one, "as the plan has it")


@pytest.mark.parametrize("length", [LONG, LONG + 33, 8192])
def test_alone_and_among_neighbours(cuda, length):
    """One sequence as a batch, packed, and among others long and short: the same bits."""
    first = slow(make(cuda, lengths=[length, 50], heads=HEADS, seed=1))
    alone = part(first, 0)
    assert_cut(alone)
    want = run(alone)
    assert_close(alone, want, oracle(alone), STRESS, f"{length} tokens alone")
    assert not same(want[0], run(alone, sequence_split=False)[0]), "was it split?"
    packed = alone.but(cu_seqlens=torch.tensor([0, length], device=cuda))
    assert_same(run(packed), want, "packed alone")
    assert_same(part_of(first, run(first), 0), want, "beside a short one")
    for others in ([length], [4 * LONG, 7 * LONG], [1, 0, 3] * 40, [LONG - 31] * 9):
        middle = len(others) // 2
        lengths = [*others[:middle], length, *others[middle:]]
        among = slow(make(cuda, lengths=lengths, heads=HEADS, seed=2))
        start = int(among.cu_seqlens[middle])
        for name in ROWS:
            getattr(among, name)[:, start : start + length] = getattr(alone, name)
        among.initial_state[middle] = alone.initial_state[0]
        assert_same(part_of(among, run(among), middle), want, f"among {len(others)} others")
    batch = {n: getattr(alone, n).repeat(3, *[1] * (getattr(alone, n).dim() - 1)) for n in ROWS}
    state = alone.initial_state.repeat(3, 1, 1, 1)
    three = alone.but(**batch, initial_state=state, sequences=3)
    for name in ROWS:
        getattr(three, name)[::2] = getattr(three, name)[::2].roll(1, 1)
    got = run(three)
    assert_same((got[0][1:2], got[1][1:2]), want, "second of a batch")


def test_the_split_depends_on_the_heads_alone(cuda):
    """Heads that are swapped swap their results."""
    call = slow(make(cuda, tokens=LONG, heads=HEADS))
    assert_cut(call)
    want = run(call)
    turned = {n: getattr(call, n).roll(1, 2) for n in ROWS}
    got = run(call.but(**turned, initial_state=call.initial_state.roll(1, 1)))
    assert_same((got[0].roll(-1, 2), got[1].roll(-1, 1)), want)


def test_run_to_run(cuda, full):
    """Two calls by turns, other work between them; slots are given out in any order."""
    calls = [
        slow(make(cuda, lengths=lengths, heads=HEADS, seed=seed))
        for seed, lengths in ((4, [LONG, 3 * LONG, 5, 2 * LONG, LONG]), (5, [6 * LONG, 0, LONG]))
    ]
    for call in calls:
        assert_cut(call)
    want = [run(call) for call in calls]
    for call, result in zip(calls, want, strict=True):
        assert_close(call, result, oracle(call), STRESS, "reference run")
    for r in range(200 if full else 40):
        if r % 3 == 0:
            queue_filler()
        assert_same(run(calls[r % 2]), want[r % 2], f"round {r}")


def test_two_streams_at_once(cuda):
    call = slow(make(cuda, lengths=[LONG, 100, 3 * LONG], heads=HEADS))
    assert_cut(call)
    want = run(call)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = [call.outputs() for _ in range(2)]
    torch.cuda.synchronize()
    for r in range(20):
        for stream, pair in zip(streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                call.into(*pair)
        torch.cuda.synchronize()
        for pair in outputs:
            assert_same(pair, want, f"round {r}")
            for x in pair:
                x.fill_(torch.nan)
        torch.cuda.synchronize()


@pytest.mark.parametrize("lengths", [None, [LONG, 7, 3 * LONG, 0]])
def test_graph_replay(cuda, lengths):
    """New contents and offsets of the same N; outputs and workspace poisoned before each replay."""
    call = slow(make(cuda, lengths=lengths, tokens=LONG, heads=HEADS, seed=1))
    other = slow(make(cuda, lengths=lengths and lengths[::-1], tokens=LONG, heads=HEADS, seed=2))
    size = workspace_size(assert_cut(call).workspace_bytes)
    want = [run(call), run(other)]
    names = [*ROWS, "A_log", "dt_bias", "initial_state", *(["cu_seqlens"] if lengths else [])]
    kept = call.but(**{n: getattr(call, n).clone() for n in names})
    out, final = kept.outputs()
    kept.into(out, final)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Of the graph's pool: the call's workspace is the block that this one gives back.
        place = torch.full((size,), 255, dtype=torch.uint8, device=cuda)
        address = place.data_ptr()
        del place
        kept.into(out, final)
        used = torch.empty(size, dtype=torch.uint8, device=cuda)
    assert used.data_ptr() == address, "the workspace was not what was poisoned"
    for r in range(20):
        source = (call, other)[r % 2]
        for n in names:
            getattr(kept, n).copy_(getattr(source, n))
        out.fill_(torch.nan)
        final.fill_(torch.nan)
        graph.replay()
        assert_same((out, final), want[r % 2], f"replay {r}")
        assert bool((used != 255).any())


@pytest.mark.parametrize("lengths", [None, [LONG, 0, 40, 3 * LONG]])
def test_state_in_place(cuda, lengths):
    call = slow(make(cuda, lengths=lengths, tokens=LONG, heads=HEADS))
    assert_cut(call)
    want = run(call)
    for dtype in (F32, BF16):
        given = call.but(initial_state=call.initial_state.to(dtype))
        apart = run(given, dtype)
        state = given.initial_state.clone()
        out, _ = call.outputs()
        flash_kda.chunk_kda(
            *(getattr(call, n) for n in ROWS),
            **options(given, initial_state=state, out=out, final_state=state),
        )
        assert_same((out, state), apart, f"in place, {dtype}")
        if dtype == F32:
            assert_same((out, state), want)


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, BF16), (BF16, BF16)])
def test_state_dtypes(cuda, dtypes):
    """States between segments stay fp32: a bf16 one is rounded at the edges of the call alone."""
    call = slow(make(cuda, lengths=[LONG, 3 * LONG], heads=HEADS))
    call = call.but(initial_state=call.initial_state.to(BF16).to(F32))
    assert_cut(call)
    want = run(call)
    given = call.but(initial_state=call.initial_state.to(dtypes[0]))
    assert_same(run(given, dtypes[1]), (want[0], want[1].to(dtypes[1])), str(dtypes))


def test_no_states(cuda):
    call = slow(make(cuda, tokens=LONG, heads=HEADS))
    zero = call.but(initial_state=torch.zeros_like(call.initial_state))
    want = run(zero)
    got = run(call.but(initial_state=None))
    assert_same(got, want, "no initial state")
    out, _ = call.outputs()
    flash_kda.chunk_kda(
        *(getattr(call, n) for n in ROWS),
        **options(call, initial_state=None, out=out, output_final_state=False),
    )
    assert torch.equal(bits(out), bits(want[0])), "no final state either"


@pytest.mark.parametrize("name", [*ROWS, "initial_state"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_neighbours(cuda, name, value):
    """One bad element in the middle sequence, head 1: all other pairs as without it."""
    call = slow(make(cuda, lengths=[LONG, 2 * LONG, LONG], heads=HEADS))
    assert_cut(call)
    want = run(call)
    bad = getattr(call, name).clone()
    if name == "initial_state":
        bad[1, 1, 5, 9] = value
    else:
        bad[(0, LONG + LONG // 2, 1, 7) if bad.dim() == 4 else (0, LONG + LONG // 2, 1)] = value
    got = run(call.but(**{name: bad}))
    for n in range(3):
        clean, dirty = part_of(call, want, n), part_of(call, got, n)
        for h in range(HEADS):
            if (n, h) == (1, 1):
                continue
            assert_same(
                [x[:, :, h] if x.shape[1] != HEADS else x[:, h] for x in dirty],
                [x[:, :, h] if x.shape[1] != HEADS else x[:, h] for x in clean],
                f"sequence {n}, head {h}",
            )


def test_later_tokens_change_nothing_before_them(cuda):
    """NaN in a late token: whole segments before it keep their bits."""
    call = slow(make(cuda, tokens=8192, heads=HEADS))
    assert_cut(call)
    want = run(call)
    for name in ROWS:
        changed = getattr(call, name).clone()
        changed[:, 8000:] = torch.nan
        got = run(call.but(**{name: changed}))
        early = slice(0, 8000 // 32 * 32)
        assert torch.equal(bits(got[0][:, early]), bits(want[0][:, early])), name


# --- many sequences -------------------------------------------------------------------------------


def test_lengths_a_thousand_times_apart(cuda):
    """Sequences of one token and of 8192 side by side."""
    lengths = [1, 8192, 1, 1, 8192, 2, 1, 8192, 1]
    call = slow(make(cuda, lengths=lengths, heads=HEADS))
    assert_cut(call)
    got = run(call)
    assert_close(call, got, oracle(call), STRESS, "1 and 8192")
    for n in range(len(lengths)):
        assert_same(part_of(call, got, n), run(part(call, n)), f"sequence {n}")


def test_a_crowd_and_a_long_one(cuda):
    """70000 sequences of 0 to 3 tokens, a long one among them."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 4, 70000).tolist()
    lengths[30000] = 8192
    tokens = sum(lengths)
    call = slow(make(cuda, tokens=tokens, heads=1, seed=6))
    cu = torch.from_numpy(np.cumsum([0, *lengths])).to(cuda)
    call = call.but(cu_seqlens=cu, sequences=len(lengths), initial_state=None)
    assert_cut(call)
    got = run(call, BF16)
    assert not torch.isnan(got[0]).any()
    assert not torch.isnan(got[1]).any()
    empty = np.flatnonzero(np.array(lengths) == 0)
    assert not got[1][torch.from_numpy(empty).to(cuda)].any(), "a state out of nothing"
    for n in (30000, 0, 1, 29999, 30001, 69999, *rng.integers(0, 70000, 40).tolist()):
        alone = part(call, n)
        if lengths[n]:
            assert_close(
                alone, part_of(call, got, n), oracle(alone), STRESS, f"{n}, {lengths[n]} tokens"
            )
        assert_same(part_of(call, got, n), run(alone, BF16), f"sequence {n}")


def test_more_split_sequences_than_multiprocessors(cuda):
    """Queues and chain longer than the grid: blocks take turns."""
    call = slow(make(cuda, lengths=[LONG] * 40, heads=HEADS))
    assert_cut(call)
    got = run(call)
    batch = {
        n: getattr(call, n).view(40, LONG, *getattr(call, n).shape[2:]) for n in ROWS
    }  # the same sequences, as a batch
    same_batch = call.but(**batch, cu_seqlens=None)
    out, final = run(same_batch)
    assert_same((out.view(1, 40 * LONG, HEADS, D), final), got, "batch and packed")
    for n in (0, 17, 39):
        assert_same(part_of(call, got, n), run(part(call, n)), f"sequence {n}")
    last = part(call, 39)
    assert_close(last, part_of(call, got, 39), oracle(last), STRESS, "the last one")


GARBAGE = [[0, 2048, 0, 2048, 0, 2048], [0, 1 << 30, -5, 2048, 0, 2048], [2048, 0] * 3]


def garbage_offsets(offsets):
    """What the test below runs in a process of its own."""
    call = make("cuda", lengths=[LONG] + [0] * (len(offsets) - 2), heads=HEADS)
    assert_cut(call)
    bad = call.but(cu_seqlens=torch.tensor(offsets, device="cuda"))
    wide = torch.full((3, LONG, HEADS, D), 7.0, dtype=BF16, device="cuda")
    states = torch.full((3, call.sequences, HEADS, D, D), 7.0, device="cuda")
    with poisoned_workspace(plan_of(bad).workspace_bytes):
        bad.into(wide[1:2], states[1])
    torch.cuda.synchronize()
    assert bool((wide[[0, 2]] == 7).all()), "wrote around out"
    assert bool((states[[0, 2]] == 7).all()), "wrote around final_state"
    assert_close(call, run(call), oracle(call), STRESS, "a good call afterwards")


@pytest.mark.parametrize("offsets", GARBAGE, ids=lambda x: "-".join(map(str, x)))
def test_garbage_cu_seqlens_stays_inside(cuda, offsets):
    """Offsets that go back and forth ask for more splits than T tokens can hold.

    In a process of its own: what goes wrong here can take the device's context with it.
    """
    code = f"import torch, test_split\nwith torch.no_grad(): test_split.garbage_offsets({offsets})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
