"""flash-linear-attention: the call that its backend makes, and the real client's dispatch to us.

The call replayed needs no fla. The client is fla-core 0.6 with Triton; where there is no GPU its
dispatch still runs (onto the CPU backend), and its Triton kernels are what the skips name.
"""

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from conftest import why_no_cuda

torch = pytest.importorskip("torch")

import flash_kda  # noqa: E402
from flash_kda.metrics import relative_rms  # noqa: E402
from flash_kda.reference import recurrent_kda  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32
D = 128
# One head count for everything that Triton runs: it compiles and tunes for each one anew.
HEADS = 16
WATCHED = (0, 7, 15)  # heads that the fp64 recurrence computes
BOUND = 5e-3  # docs/contract.md, ordinary inputs; flash-linear-attention's kernels keep it too
# What the backend passes by keyword; the first seven arguments go by position.
BY_KEYWORD = ("A_log", "dt_bias", "lower_bound", "initial_state", "final_state", "cu_seqlens")
IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "state_v_first": True,
    "lower_bound": -5.0,
}

Keywords = dict[str, Any]


# --- inputs ---------------------------------------------------------------------------------------


def keywords(device: str, *, lengths=None, batch=2, tokens=150, seed=0, state=True) -> Keywords:
    """Of flash-linear-attention's `chunk_kda`, as its layer calls it; each head has its own data.

    `lengths` packs; `state` gives an initial state [N, H, V, K] in fp32.
    """
    rng = torch.Generator().manual_seed(seed)
    sequences = batch
    if lengths is not None:
        batch, tokens, sequences = 1, sum(lengths), len(lengths)

    def normal(*shape, dtype=BF16, scale=1.0):
        return (torch.randn(*shape, generator=rng) * scale).to(dtype).to(device)

    rows = (batch, tokens, HEADS, D)
    return {
        **IN_KERNEL,
        **{name: normal(*rows) for name in ("q", "k", "v", "g")},
        "beta": normal(*rows[:3]),
        "A_log": torch.rand(HEADS, generator=rng).mul(0.5).to(device),
        "dt_bias": normal(HEADS * D, dtype=F32, scale=0.1),
        "initial_state": normal(sequences, HEADS, D, D, dtype=F32) if state else None,
        "output_final_state": True,
        "cu_seqlens": None
        if lengths is None
        else torch.tensor(np.cumsum([0, *lengths]), device=device),
    }


def column_blocks(args: Keywords) -> Keywords:
    """q, k, v, g and beta as parts of one projection's rows, with a gap that holds NaN."""
    batch, tokens = args["q"].shape[:2]
    wide = torch.full((batch, tokens, 4 * HEADS * D + HEADS + 8), torch.nan, dtype=BF16)
    wide = wide.to(args["q"].device)
    *blocks, beta, _ = wide.split([HEADS * D] * 4 + [HEADS, 8], dim=-1)
    views = {
        name: block.unflatten(-1, (HEADS, D))
        for name, block in zip(("q", "k", "v", "g"), blocks, strict=True)
    }
    views["beta"] = beta
    for name, view in views.items():
        view.copy_(args[name])
    return args | views


def heads_first(args: Keywords) -> Keywords:
    """q, k, v, g with [B, H, T, D] memory: `torch.empty_like(v)` then has it too."""
    return args | {
        name: args[name].transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("q", "k", "v", "g")
    }


def with_(**changes):
    def change(args: Keywords) -> Keywords:
        return args | {
            name: value(args[name]) if callable(value) else value for name, value in changes.items()
        }

    return change


def state_by_rows(state):
    """The same states, not contiguous: the backend copies them."""
    return state.mT.contiguous().mT


LENGTHS = [70, 1, 0, 200, 64, 63]
# How the inputs are made, what is changed then.
CASES: dict[str, tuple[Keywords, Any]] = {
    "dense": ({}, with_()),
    "dense, no states": ({"state": False}, with_(output_final_state=False)),
    "one token": ({"batch": 3, "tokens": 1}, with_()),
    "packed": ({"lengths": LENGTHS}, with_()),
    "packed, int32 offsets": ({"lengths": LENGTHS}, with_(cu_seqlens=lambda x: x.int())),
    "packed, no initial state": ({"lengths": LENGTHS, "state": False}, with_()),
    "packed, no final state": ({"lengths": LENGTHS}, with_(output_final_state=False)),
    "initial state bf16": ({"lengths": LENGTHS}, with_(initial_state=lambda x: x.to(BF16))),
    "initial state strided": ({"lengths": LENGTHS}, with_(initial_state=state_by_rows)),
    "beta fp32": ({}, with_(beta=lambda x: x.float())),
    "dt_bias [H, K]": ({}, with_(dt_bias=lambda x: x.view(HEADS, D))),
    "A_log [1, 1, H, 1]": ({}, with_(A_log=lambda x: x.view(1, 1, HEADS, 1))),
    "model.to(bfloat16)": ({}, with_(A_log=lambda x: x.to(BF16), dt_bias=lambda x: x.to(BF16))),
    "model.to(float16), dt_bias": ({}, with_(dt_bias=lambda x: x.half())),
    "lower_bound -1": ({}, with_(lower_bound=-1.0)),
    "scale 0.3": ({}, with_(scale=0.3)),
    "column blocks": ({"lengths": LENGTHS}, column_blocks),
    "head before token": ({}, heads_first),
}
# Kept to few element types and layouts, which Triton compiles for anew.
AGAINST_TRITON = ("dense", "packed", "packed, no initial state", "column blocks", "scale 0.3")


def case(name: str, device: str) -> Keywords:
    make, change = CASES[name]
    return change(keywords(device, **make))


# --- the right results ----------------------------------------------------------------------------


def recurrence(args: Keywords, heads=WATCHED):
    """Outputs [B, T, heads, V] and final states [N, heads, V, K] in fp64."""
    dt_bias = args["dt_bias"]
    options = {
        "scale": args.get("scale"),
        "lower_bound": args["lower_bound"],
        "A_log": None if args["A_log"] is None else args["A_log"].float().reshape(-1),
        "dt_bias": None if dt_bias is None else dt_bias.float().reshape(HEADS, D),
        "initial_state": args["initial_state"],
        "cu_seqlens": args["cu_seqlens"],
        "heads": heads,
    }
    return recurrent_kda(*(args[name] for name in ("q", "k", "v", "g", "beta")), **options)


def spans(args: Keywords):
    """(row, slice) of each sequence."""
    if args["cu_seqlens"] is None:
        return [(b, slice(None)) for b in range(args["q"].shape[0])]
    return [(0, slice(a, b)) for a, b in pairwise(args["cu_seqlens"].tolist())]


def watched(got):
    """The heads that `recurrence` computes."""
    o, final = got
    return o[:, :, WATCHED], None if final is None else final[:, WATCHED]


def worst_error(args: Keywords, got, want) -> float:
    """The largest relative RMS error of any sequence and head, of out and of a final state."""
    worst = [0.0]
    for b, span in spans(args):
        if got[0][b, span].shape[0]:
            worst.extend(relative_rms(got[0][b, span], want[0][b, span], (0, 2)))
    if got[1] is not None:
        worst.extend(relative_rms(got[1], want[1], (2, 3)).flat)
    return float(max(worst))


def difference(args: Keywords, got, want) -> float:
    """The largest relative RMS difference of any sequence, its heads together.

    A head's own would say nothing where a sequence is one token without a state: its output is
    v times q k, which may all but vanish while what bf16 leaves of q and k does not.
    """
    worst = [
        relative_rms(got[0][b, span], want[0][b, span], (0, 1, 2))
        for b, span in spans(args)
        if got[0][b, span].shape[0]
    ]
    if got[1] is not None:
        worst.extend(relative_rms(got[1], want[1], (1, 2, 3)).flat)
    return float(max(worst))


def assert_right(args: Keywords, got) -> None:
    """Types, and the values of the watched heads against fp64."""
    o, final = got
    assert o.shape == args["v"].shape
    assert o.dtype == BF16
    assert (final is not None) == args["output_final_state"]
    if final is not None:
        assert final.dtype == F32
    assert not o.isnan().any()
    error = worst_error(args, watched(got), recurrence(args))
    assert error <= BOUND, f"relative RMS error {error:.2e} over {BOUND}"


def copies(args: Keywords) -> dict[str, Any]:
    return {name: x.clone() for name, x in args.items() if isinstance(x, torch.Tensor)}


def assert_unchanged(args: Keywords, before: dict[str, Any]) -> None:
    for name, x in before.items():
        as_bytes = [y.contiguous().flatten().view(torch.uint8) for y in (args[name], x)]
        assert torch.equal(*as_bytes), f"{name} was written"


# --- the backend's call, replayed -----------------------------------------------------------------


def backend_call(
    q, k, v, g, beta, *, A_log, dt_bias, lower_bound, scale=None, initial_state=None,
    output_final_state=False, cu_seqlens=None, **_,
):  # fmt: skip
    """What fla-core 0.6.0 does in `fla.ops.kda.backends.flash_kda`, with poisoned outputs."""
    if scale is None:
        scale = q.shape[-1] ** -0.5
    heads, dim = v.shape[2:]
    n = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if dt_bias is not None and dt_bias.ndim == 1:
        dt_bias = dt_bias.view(heads, -1)
    out = torch.empty_like(v).fill_(torch.nan)
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    final_state = None
    if output_final_state:
        final_state = torch.full((n, heads, q.shape[-1], dim), torch.nan, device=q.device)
    if cu_seqlens is not None and cu_seqlens.dtype != torch.long:
        cu_seqlens = cu_seqlens.to(torch.long)
    flash_kda.fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        initial_state=initial_state,
        final_state=final_state,
        cu_seqlens=cu_seqlens,
    )
    return out, final_state


@pytest.mark.parametrize("name", CASES)
def test_replayed_call(device, name):
    args = case(name, device)
    before = copies(args)
    with torch.inference_mode():
        got = backend_call(**args)
    assert_right(args, got)
    assert_unchanged(args, before)


@pytest.mark.parametrize("missing", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_replayed_call_without_parameters(device, missing):
    """The backend's signature allows None."""
    args = keywords(device) | dict.fromkeys(missing)
    assert_right(args, backend_call(**args))


def test_replayed_call_without_a_bound(device):
    """`safe_gate=True` with `lower_bound=None` passes its checks: an error, no silent default."""
    args = keywords(device, tokens=20) | {"lower_bound": None}
    with pytest.raises(ValueError, match=r"^lower_bound: .*got None"):
        backend_call(**args)
    args["lower_bound"] = -5.0
    assert_right(args, backend_call(**args))


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_parameters_of_other_types(name):
    """Widened are torch's 2-byte floats alone: a model cast as a whole has no others."""
    args = keywords("cpu", tokens=5)
    for wrong in (args[name].double(), args[name].int()):
        with pytest.raises(ValueError, match=rf"^{name}: .*float32"):
            backend_call(**args | {name: wrong})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_model_cast_as_a_whole_compiled(device, backend):
    """The same widening when torch.compile traces the call, and in `chunk_kda`."""
    torch._dynamo.reset()
    args = case("model.to(bfloat16)", device)
    with torch.inference_mode():
        want = flash_kda.chunk_kda(**args)
        got = torch.compile(flash_kda.chunk_kda, fullgraph=True, backend=backend)(**args)
    assert_right(args, want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


# --- the client -----------------------------------------------------------------------------------


@pytest.fixture
def fla(monkeypatch):
    """flash-linear-attention's `fla.ops.kda`, with our backend enabled."""
    pytest.importorskip("triton", reason="the client needs triton and fla-core")
    pytest.importorskip("fla", reason="the client needs fla-core (0.6)")
    kda = pytest.importorskip("fla.ops.kda")
    pytest.importorskip("fla.ops.kda.backends.flash_kda", reason="this fla-core does not know us")
    monkeypatch.delenv("FLA_FLASH_KDA", raising=False)
    return kda


@pytest.fixture
def calls(monkeypatch):
    """(positional, keywords) of each call of `flash_kda.fwd`, which runs into poisoned outputs."""
    seen: list[tuple[tuple[Any, ...], Keywords]] = []
    real = flash_kda.fwd

    def fwd(*args, **kwargs):
        seen.append((args, kwargs))
        for x in (args[6], kwargs["final_state"]):
            if x is not None:
                x.fill_(torch.nan)
        return real(*args, **kwargs)

    monkeypatch.setattr(flash_kda, "fwd", fwd)
    return seen


@pytest.fixture
def gpu():
    """For what means nothing without one."""
    if why_no_cuda():
        pytest.skip(why_no_cuda())


@pytest.fixture
def triton_path(fla, gpu, monkeypatch):
    """The client's own kernels, our backend off. Not tuned: that takes minutes, for speed alone."""
    from triton.runtime.autotuner import Autotuner

    every = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda *args: every(*args)[:1])

    def call(**args):
        with monkeypatch.context() as patch:
            patch.setenv("FLA_FLASH_KDA", "0")
            return fla.chunk_kda(**args)

    return call


@pytest.fixture
def fallback(fla, monkeypatch):
    """Counts calls that reach the client's own implementation, which is not run."""
    seen: list[tuple[Any, ...]] = []

    class Function:
        @staticmethod
        def apply(*args):
            seen.append(args)
            return "out", "state"

    module = inspect.getmodule(inspect.unwrap(fla.chunk_kda))
    monkeypatch.setattr(module, "ChunkKDAFunction", Function)
    return seen


def test_replay_is_what_the_client_does(fla, calls):
    """The call recorded from the client, beside the replayed one."""
    args = case("packed, int32 offsets", "cpu")
    with torch.inference_mode():
        fla.chunk_kda(**args)
        backend_call(**args)
    client, replay = calls
    assert len(client[0]) == len(replay[0]) == 7
    assert set(client[1]) == set(replay[1]) == set(BY_KEYWORD)
    pairs = [*zip(client[0], replay[0], strict=True)]
    pairs += [(client[1][name], replay[1][name]) for name in BY_KEYWORD]
    for a, b in pairs:
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        else:
            assert a == b


def test_chunk_kda_has_the_clients_signature(fla):
    """Names, order and defaults; the client takes the last ones as **kwargs."""
    theirs = inspect.signature(inspect.unwrap(fla.chunk_kda)).parameters
    ours = inspect.signature(flash_kda.chunk_kda).parameters
    named = [p for p in theirs.values() if p.kind is not p.VAR_KEYWORD]
    assert [p.name for p in named] == list(ours)[: len(named)]
    for p in named:
        assert ours[p.name].default == p.default, p.name
    assert {"A_log", "dt_bias"} <= set(ours)


@pytest.mark.parametrize("name", CASES)
def test_dispatch(fla, device, calls, fallback, name):
    """Each case reaches us once, not the client's kernels, and is right."""
    args = case(name, device)
    before = copies(args)
    for mode in (torch.inference_mode, torch.no_grad):
        calls.clear()
        with mode():
            got = fla.chunk_kda(**args)
        assert len(calls) == 1
        assert not fallback
        assert_right(args, got)
    assert_unchanged(args, before)


@pytest.mark.parametrize("name", AGAINST_TRITON)
def test_equals_the_clients_kernels(fla, triton_path, calls, name):
    args = case(name, "cuda")
    with torch.inference_mode():
        ours = fla.chunk_kda(**args)
        assert len(calls) == 1
        theirs = triton_path(**args)
    assert len(calls) == 1, "FLA_FLASH_KDA=0 does not turn us off"
    want = recurrence(args)
    errors = {
        "ours": worst_error(args, watched(ours), want),
        "theirs": worst_error(args, watched(theirs), want),
        "difference, all heads": difference(args, ours, theirs),
    }
    print(f"{name}: " + ", ".join(f"{k} {e:.2e}" for k, e in errors.items()))
    assert errors["ours"] <= BOUND, errors
    assert errors["theirs"] <= 2 * BOUND, errors
    assert errors["difference, all heads"] <= 2 * BOUND, errors


def kernels_of(call) -> list[str]:
    """Names of the GPU kernels that a call runs, by the profiler."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    for _ in range(2):  # the first session may miss its first work
        with torch.profiler.profile(activities=activities) as profiler:
            call()
            torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [event.name for event in profiler.events() if event.device_type == cuda]


OURS = re.compile(r"flash_kda::.*forward_kernel")
THEIRS = re.compile(r"chunk_kda_fwd_kernel|chunk_gated_delta_rule_fwd_kernel")


def test_which_kernels_run(fla, triton_path):
    """By the profiler, with and without FLA_FLASH_KDA=0."""
    args = case("packed", "cuda")

    def ours():
        fla.chunk_kda(**args)

    def theirs():
        triton_path(**args)

    with torch.inference_mode():
        ours()
        theirs()
        names = {call.__name__: kernels_of(call) for call in (ours, theirs)}
    print(names)
    assert [name for name in names["ours"] if OURS.search(name)]
    assert not [name for name in names["ours"] if THEIRS.search(name)]
    assert [name for name in names["theirs"] if THEIRS.search(name)]
    assert not [name for name in names["theirs"] if "flash_kda" in name]


def test_in_a_graph(fla, gpu, calls):
    """A CUDA graph of the client's call; new contents, new offsets of the same N, poison."""
    kept, other = (
        keywords("cuda", lengths=lengths, seed=seed)
        for seed, lengths in enumerate((LENGTHS, LENGTHS[::-1]))
    )
    with torch.inference_mode():
        want = [fla.chunk_kda(**args) for args in (kept, other)]
        sources = [copies(kept), copies(other)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fla.chunk_kda(**kept)
        assert len(calls) == 3
        for r in range(4):
            for name, x in sources[r % 2].items():
                kept[name].copy_(x)
            for x in got:
                x.fill_(torch.nan)
            graph.replay()
            assert_right((kept, other)[r % 2], got)
            for x, y in zip(got, want[r % 2], strict=True):
                assert torch.equal(x, y), f"replay {r}"


def test_turned_off(fla, device, calls, fallback, monkeypatch):
    """The variable is read at each call."""
    args = keywords(device, tokens=70)
    with torch.inference_mode():
        for value, ours in (("0", 0), ("1", 1), ("0", 0)):
            calls.clear()
            fallback.clear()
            monkeypatch.setenv("FLA_FLASH_KDA", value)
            fla.chunk_kda(**args)
            assert (len(calls), len(fallback)) == (ours, 1 - ours), value


# What the backend leaves to the client's own kernels.
KEPT: dict[str, Any] = {
    "unbounded gate": with_(safe_gate=False),
    "given decay": with_(use_gate_in_kernel=False, g=lambda g: -g.abs()),
    "no A_log": with_(A_log=None),
    "no dt_bias": with_(dt_bias=None),
    "given strength": with_(use_beta_sigmoid_in_kernel=False, beta=lambda b: b.sigmoid()),
    "no l2norm": with_(use_qk_l2norm_in_kernel=False),
    "doubled strength": with_(allow_neg_eigval=True),
    "states [K, V]": with_(state_v_first=False),
    "fp16": with_(**dict.fromkeys("qkv", lambda x: x.half())),
    "more value heads": with_(q=lambda x: x[:, :, ::2], k=lambda x: x[:, :, ::2]),
}


@pytest.mark.parametrize("name", KEPT)
def test_left_to_the_client(fla, device, calls, fallback, name):
    args = KEPT[name](keywords(device, tokens=70))
    with torch.inference_mode():
        fla.chunk_kda(**args)
    assert (len(calls), len(fallback)) == (0, 1)


def test_training_is_left_to_the_client(fla, device, calls, fallback):
    """Whenever grad mode is on, also when no input asks for a gradient; we raise if one does."""
    args = keywords(device, tokens=70)
    fla.chunk_kda(**args)
    assert (len(calls), len(fallback)) == (0, 1)
    for name in ("q", "A_log", "initial_state"):
        asking = args | {name: args[name].clone().requires_grad_()}
        fla.chunk_kda(**asking)
        with pytest.raises(NotImplementedError, match=f"^{name}: .*requires_grad"):
            backend_call(**asking)
        with torch.no_grad():
            assert_right(asking, fla.chunk_kda(**asking))
    assert (len(calls), len(fallback)) == (4 + 2, 4)  # refused calls and those without a gradient


def test_training_computes_gradients(fla, triton_path, calls):
    """On the client's kernels, forward: what it returns is part of a graph."""
    args = keywords("cuda", lengths=LENGTHS, state=False)
    args["q"].requires_grad_()
    o, _ = fla.chunk_kda(**args)
    assert o.requires_grad
    assert o.grad_fn is not None
    assert not calls


def test_state_passes_from_one_to_the_other(fla, triton_path, calls):
    """Our final state into the client's recurrent kernel, as its layer decodes after a prefill."""
    args = keywords("cuda", batch=2, tokens=200, state=False)
    parts = [
        args | {name: args[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        for rows in (slice(None, 190), slice(190, None))
    ]
    step = {name: x for name, x in parts[1].items() if name != "safe_gate"}
    with torch.inference_mode():
        first, state = fla.chunk_kda(**parts[0])
        assert len(calls) == 1
        second, final = fla.fused_recurrent_kda(**step | {"initial_state": state})
    got = torch.cat([first, second], dim=1), final
    assert_right(args, got)


def test_options_of_our_own_mean_the_clients(fla, triton_path):
    """What its backend does not send us, called by hand: the same results as its kernels."""
    args = keywords("cuda", lengths=LENGTHS)
    args |= {"state_v_first": False, "allow_neg_eigval": True, "A_log": None}
    with torch.inference_mode():
        ours = flash_kda.chunk_kda(**args)
        theirs = triton_path(**args)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
    difference = relative_rms(ours[0], theirs[0]), relative_rms(ours[1], theirs[1])
    assert max(float(x) for x in difference) <= 2 * BOUND, difference
