"""fwd, chunk_kda and plan_forward: meaning of the arguments, errors, what they leave alone."""

from __future__ import annotations

import inspect
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import flash_kda
from api_support import BF16, F16, F32, assert_close, expected, problem

# --- the answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("lengths", [None, [5, 0, 1, 40]], ids=["batch", "packed"])
def test_fwd_writes_outputs_and_states(dtype, lengths):
    p = problem(dtype, lengths=lengths)
    before = p.mapped(np.copy)
    assert p.fwd() is None
    o, final = expected(p)
    assert_close(p.out, o, dtype)
    assert_close(p.final_state, final, F32)
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        assert getattr(p, name).tobytes() == getattr(before, name).tobytes(), name


def test_one_step_by_hand_decays_first():
    """One token: the state decays, then the error is taken against the decayed state."""
    q = np.array([[[[1.0, 0.0]]]], np.float32)
    k = np.array([[[[0.0, 1.0]]]], np.float32)
    v = np.array([[[[3.0]]]], np.float32)
    g = np.log(np.array([[[[0.5, 0.25]]]], np.float32))  # the log decay itself
    beta = np.array([[[0.5]]], np.float32)
    state = np.array([[[[8.0, 4.0]]]], np.float32)  # [N, HV, V, K]
    o, final = flash_kda.chunk_kda(q, k, v, g, beta, 2.0, state, True, state_v_first=True)
    # decayed: [4, 1]; error 3 - 1 = 2, half of it is written at k: [4, 2]; o = 2 * 4.
    np.testing.assert_allclose(final.ravel(), [4.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(o.ravel(), [8.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "meaning"),
    [
        ({}, {}),
        ({"lower_bound": -1.0}, {"lower_bound": -1.0}),
        ({"lower_bound": 0}, {"lower_bound": 0.0}),
        ({"lower_bound": None}, {"gate": "softplus"}),
        ({"safe_gate": True}, {}),
        ({"allow_neg_eigval": True}, {"beta_kind": "doubled_logit"}),
        ({"scale": 0.5}, {"scale": 0.5}),
        ({"scale": np.float32(0.5)}, {"scale": 0.5}),
        ({"A_log": None}, {"A_log": None}),
        ({"dt_bias": None}, {"dt_bias": None}),
        ({"initial_state": None}, {"initial_state": None}),
        ({"threads": 1}, {}),
        ({"use_graph": True, "max_num_seqs": 2, "disable_recompute": True, "chunk_size": 32}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_chunk_kda_options(options, meaning):
    p = problem()
    o, final = p.chunk_kda(**options)
    want_o, want_final = expected(p, **meaning)
    assert_close(o, want_o, F32)
    assert_close(final, want_final, F32)


def test_given_decay_and_strength():
    p = problem()
    p.g = -np.abs(p.g)
    p.beta = np.abs(p.beta) / (1 + np.abs(p.beta))
    options = {
        "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False,
        "use_beta_sigmoid_in_kernel": False, "A_log": None, "dt_bias": None,
    }  # fmt: skip
    p.q /= 8
    p.k /= 8
    o, final = p.chunk_kda(**options)
    meaning = {"A_log": None, "dt_bias": None, "gate": "log_decay", "beta_kind": "probability"}
    want_o, want_final = expected(p, **meaning, l2norm=False)
    assert_close(o, want_o, F32)
    assert_close(final, want_final, F32)


def test_final_state_only_if_asked_for():
    p = problem()
    o, final = p.chunk_kda(output_final_state=False)
    assert final is None
    assert_close(o, expected(p)[0], F32)


def test_outputs_of_the_caller_are_used():
    p = problem(BF16, state_dtype=BF16)
    o, final = p.chunk_kda(out=p.out, final_state=p.final_state, output_final_state=False)
    assert o is p.out
    assert final is p.final_state
    want_o, want_final = expected(p)
    assert_close(p.out, want_o, BF16)
    assert_close(p.final_state, want_final, BF16)


def test_state_updated_in_place():
    p, q = problem(seed=3), problem(seed=3)
    p.fwd()
    q.final_state = q.initial_state
    q.fwd()
    assert p.final_state.tobytes() == q.final_state.tobytes()
    assert p.out.tobytes() == q.out.tobytes()


class TestStateLayout:
    """state_v_first=False is flash-linear-attention's [N, HV, K, V]."""

    def test_dense_key_first_states(self):
        p = problem(K=16, V=16)  # equal sizes: a wrong layout would not show in the shape
        want_o, want_final = expected(p)
        key_first = np.ascontiguousarray(p.initial_state.swapaxes(-1, -2))
        o, final = p.chunk_kda(state_v_first=False, initial_state=key_first)
        assert_close(o, want_o, F32)
        assert_close(final.swapaxes(-1, -2), want_final, F32)

    def test_transposed_view_is_taken_as_it_is(self):
        p = problem()
        _, final = p.chunk_kda(
            state_v_first=False,
            initial_state=p.initial_state.swapaxes(-1, -2),
            final_state=p.final_state.swapaxes(-1, -2),
        )
        assert final.base is p.final_state
        assert_close(p.final_state, expected(p)[1], F32)

    def test_dense_key_first_final_state_is_filled(self):
        p = problem(state_dtype=BF16)
        target = np.full((2, 4, 24, 16), np.nan, np.float32)
        _, final = p.chunk_kda(
            state_v_first=False,
            initial_state=np.ascontiguousarray(p.initial_state.swapaxes(-1, -2)),
            final_state=target,
        )
        assert final is target
        assert_close(target.swapaxes(-1, -2), expected(p)[1], F32)

    def test_state_in_place(self):
        p = problem()
        want = expected(p)[1]
        state = np.ascontiguousarray(p.initial_state.swapaxes(-1, -2))
        p.chunk_kda(state_v_first=False, initial_state=state, final_state=state)
        assert_close(state.swapaxes(-1, -2), want, F32)

    def test_pool_is_not_copied(self):
        p = problem()
        pool = np.zeros((5, 4, 24, 16), np.float32)
        with pytest.raises(ValueError, match="final_state: expected.*transposed view"):
            p.chunk_kda(
                state_v_first=False, initial_state=None, final_state=pool,
                final_state_indices=np.array([1, 2]),
            )  # fmt: skip

    def test_old_name(self):
        p = problem()
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            o, _ = p.chunk_kda(state_v_first=False, transpose_state_layout=True)
        assert_close(o, expected(p)[0], F32)
        with pytest.raises(ValueError, match="transpose_state_layout"):
            p.chunk_kda(state_v_first=True, transpose_state_layout=True)


def test_pools_and_indices():
    p = problem(lengths=[9, 20, 3])
    rng = np.random.default_rng(1)
    pool = rng.standard_normal((8, 4, 16, 24)).astype(np.float32)
    before = pool.copy()
    _, final = p.chunk_kda(
        initial_state=pool, initial_state_indices=np.array([5, -1, 2], np.int32),
        final_state=pool, final_state_indices=np.array([5, 7, -1], np.int64),
    )  # fmt: skip
    assert final is pool
    states = np.stack([before[5], np.zeros_like(before[0]), before[2]])
    want = expected(p, initial_state=states)[1]
    assert_close(pool[[5, 7]], want[:2], F32)
    untouched = [0, 1, 2, 3, 4, 6]
    assert pool[untouched].tobytes() == before[untouched].tobytes()


def test_checkpoints():
    p = problem(lengths=[130, 70])
    states = np.full((4, 4, 16, 24), np.nan, np.float32)
    p.chunk_kda(
        checkpoint_states=states,
        checkpoint_sequences=np.array([0, 0, 1, 1], np.int32),
        checkpoint_positions=np.array([64, 128, 64, 0], np.int32),
        checkpoint_slots=np.array([3, 0, 1, -1], np.int32),
    )
    first = expected(p, checkpoints=[(0, 64)])  # only to be sure that the recurrence takes them
    assert len(first) == 2
    for slot, (sequence, position) in {3: (0, 64), 0: (0, 128), 1: (1, 64)}.items():
        rows = slice(130 * sequence, 130 * sequence + position)
        part = problem(lengths=[130, 70])
        for name in ("q", "k", "v", "g", "beta"):
            setattr(part, name, getattr(part, name)[:, rows])
        part.initial_state = part.initial_state[sequence : sequence + 1]
        part.cu_seqlens = None
        assert_close(states[slot : slot + 1], expected(part)[1], F32)
    assert np.isnan(states[2]).all()


# --- the plan -------------------------------------------------------------------------------------


def test_plan():
    p = problem(lengths=[9, 20, 3])
    plan = flash_kda.plan_forward(p.q, p.k, p.v, p.g, p.beta, cu_seqlens=p.cu_seqlens, threads=2)
    assert (plan.backend, plan.batch, plan.tokens, plan.sequences) == ("cpu", 1, 32, 3)
    assert (plan.key_heads, plan.value_heads, plan.key_dim, plan.value_dim) == (2, 4, 24, 16)
    assert plan.varlen
    assert plan.threads == 2
    assert plan.workspace_bytes == 0
    assert plan.reason in " ".join(plan.describe().split())
    assert str(plan) == plan.describe()
    with pytest.raises(TypeError, match="thread"):
        flash_kda.plan_forward(p.q, p.k, p.v, p.g, p.beta, thread=2)
    with pytest.raises(ValueError, match="^k: "):
        flash_kda.plan_forward(p.q, p.k[:, :5], p.v, p.g, p.beta)


def test_same_shapes_with_other_options_and_dtypes_get_plans_of_their_own():
    """A plan is kept by everything that it depends on (R47: one was keyed without dtype)."""
    for _ in range(2):
        for dtype in (BF16, F32, F16):
            for options, meaning in (
                ({}, {}),
                ({"allow_neg_eigval": True}, {"beta_kind": "doubled_logit"}),
                ({"lower_bound": None}, {"gate": "softplus"}),
                (
                    {"use_qk_l2norm_in_kernel": False, "scale": 0.01},
                    {"l2norm": False, "scale": 0.01},
                ),
                ({"dt_bias": None}, {"dt_bias": None}),
                ({"output_final_state": False}, {}),
            ):
                p = problem(dtype, T=9)
                p.k = (p.k.astype(np.float32) / 8).astype(dtype)
                o, _ = p.chunk_kda(**options)
                assert_close(o, expected(p, **meaning)[0], dtype)


def test_many_shapes_from_many_threads():
    """More shapes than the plan cache has places, from several threads at once."""
    problems = [problem(B=1, T=t, H=1, HV=1, K=4, V=4) for t in range(1, 301)]
    failures = []

    def work(order):
        try:
            for i in order:
                plan = flash_kda.plan_forward(
                    problems[i].q, problems[i].k, problems[i].v, problems[i].g, problems[i].beta
                )
                assert plan.tokens == i + 1
                o, _ = problems[i].chunk_kda(threads=1)
                want.setdefault(i, o.tobytes())
                assert want[i] == o.tobytes()
        except BaseException as error:
            failures.append(error)

    want: dict[int, bytes] = {}
    orders = [np.random.default_rng(seed).permutation(300) for seed in range(4)]
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"nonsense": 1}, TypeError, "nonsense"),
        ({"head_first": True}, TypeError, "head_first"),
        ({"lower_bound": "-5"}, TypeError, "^lower_bound: expected a number, got str"),
        ({"lower_bound": True}, TypeError, "^lower_bound: expected a number, got bool"),
        ({"lower_bound": np.zeros(1)}, TypeError, "^lower_bound: expected a number, got ndarray"),
        ({"lower_bound": float("nan")}, ValueError, "^lower_bound: .*got nan"),
        ({"lower_bound": 1.0}, ValueError, "^lower_bound: "),
        ({"lower_bound": None, "safe_gate": True}, ValueError, "^lower_bound: .*None"),
        ({"scale": "big"}, TypeError, "^scale: expected a number or None, got str"),
        ({"scale": float("inf")}, ValueError, "^scale: "),
        ({"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False}, ValueError,
         "^allow_neg_eigval: "),
        ({"use_gate_in_kernel": False}, ValueError, "^A_log: "),
        ({"use_gate_in_kernel": 1}, TypeError, "^use_gate_in_kernel: expected a bool, got int"),
        ({"use_qk_l2norm_in_kernel": None}, TypeError, "^use_qk_l2norm_in_kernel: .*NoneType|None"),
        ({"use_beta_sigmoid_in_kernel": "no"}, TypeError, "^use_beta_sigmoid_in_kernel: "),
        ({"output_final_state": 1}, TypeError, "^output_final_state: "),
        ({"state_v_first": "yes"}, TypeError, "^state_v_first: "),
        ({"return_intermediate_states": True}, NotImplementedError,
         "^return_intermediate_states: "),
        ({"cp_context": object()}, NotImplementedError, "^cp_context: "),
        ({"chunk_size": 17}, ValueError, "^chunk_size: "),
        ({"threads": -1}, ValueError, "^threads: "),
        ({"threads": 1.5}, TypeError, "^threads: expected an int, got float"),
        ({"threads": 2**40}, ValueError, "^threads: "),
        ({"value_split": "all"}, TypeError, "^value_split: "),
        ({"sequence_split": 0}, TypeError, "^sequence_split: "),
        ({"initial_state": [0.0]}, TypeError, "^initial_state: expected an array.*got list"),
        ({"initial_state": np.zeros((2, 4, 24), np.float32)}, ValueError, "^initial_state: "),
        ({"initial_state": np.zeros((2, 4, 24), np.float32), "state_v_first": False}, ValueError,
         r"^initial_state: expected shape \[N, HV, K, V\]"),
        ({"cu_seqlens": [0, 5]}, TypeError, "^cu_seqlens: expected an array"),
        ({"cu_seqlens": np.zeros((0,), np.int64)}, ValueError, "^cu_seqlens: "),
        ({"A_log": "x"}, TypeError, "^A_log: .*or None, got str"),
        ({"final_state_indices": np.array([0, 1])}, ValueError, "final_state"),
    ],
    ids=str,
)  # fmt: skip
def test_chunk_kda_errors(change, error, text):
    p = problem()
    with pytest.raises(error, match=text):
        p.chunk_kda(**change)
    assert_close(p.chunk_kda()[0], expected(p)[0], F32)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("wrong", [None, [[1.0]], 3.0, "text", np.ndarray], ids=repr)
def test_no_array(name, wrong):
    for call in ("fwd", "chunk_kda"):
        p = problem()
        setattr(p, name, wrong)
        came = "None" if wrong is None else type(wrong).__name__
        with pytest.raises(TypeError, match=f"^{name}: expected an array .*got {came}"):
            getattr(p, call)()


def test_fwd_errors():
    p = problem()
    arguments = list(p.fwd_arguments())
    arguments[9] = None
    with pytest.raises(ValueError, match="^lower_bound: .*None"):
        flash_kda.fwd(*arguments)
    with pytest.raises(TypeError, match="^out: "):
        flash_kda.fwd(*arguments[:6], None, *arguments[7:9], -5.0)
    with pytest.raises(TypeError, match="unknown"):
        flash_kda.fwd(*arguments, unknown=1)
    with pytest.raises(TypeError, match="lower_bound"):
        flash_kda.fwd(*arguments[:9])
    assert np.isnan(p.out).all()
    p.fwd()
    assert_close(p.out, expected(p)[0], F32)


def test_fwd_takes_flash_linear_attentions_call():
    """Positions and keywords as its backend passes them: dt_bias [HV, K], states None or fp32."""
    p = problem(BF16)
    flash_kda.fwd(
        p.q, p.k, p.v, p.g, p.beta, 24**-0.5, p.out, A_log=p.A_log, dt_bias=p.dt_bias,
        lower_bound=-5.0, initial_state=None, final_state=p.final_state, cu_seqlens=None,
    )  # fmt: skip
    o, final = expected(p, initial_state=None)
    assert_close(p.out, o, BF16)
    assert_close(p.final_state, final, F32)
    names = list(inspect.signature(flash_kda.fwd).parameters)
    assert names == [
        "q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound",
        "initial_state", "final_state", "cu_seqlens",
    ]  # fmt: skip


# --- the package ----------------------------------------------------------------------------------


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_import_needs_numpy_at_most():
    """In a process where nothing but NumPy of the third-party packages can be imported."""
    done = run_python(
        """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "cupy", "jax", "ml_dtypes", "typer", "rich"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import numpy as np
import flash_kda
q = np.ones((1, 3, 1, 4), np.float32)
o, s = flash_kda.chunk_kda(q, q, q, -q, q[..., 0] / 2, output_final_state=True)
assert o.shape == q.shape and np.isfinite(o).all() and s.shape == (1, 1, 4, 4)
print(flash_kda.__version__, *flash_kda.backends(), sep="\\n")
"""
    )
    assert done.returncode == 0, done.stderr
    assert flash_kda.__version__ in done.stdout


def test_import_leaves_torch_alone():
    done = run_python("import sys, flash_kda; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_backends_and_version():
    infos = {info.name: info for info in flash_kda.backends()}
    assert infos["cpu"].available
    assert "cuda-sm90" in infos
    assert infos["cuda-sm90"].detail
    assert flash_kda.__version__.count(".") == 2


def test_installed_cpp_package():
    root = pathlib.Path(flash_kda.cmake_dir())
    assert (root / "flash_kdaConfig.cmake").is_file()
    assert (root / "flash_kdaTargets.cmake").is_file()
    assert (pathlib.Path(flash_kda.include_dir()) / "flash_kda" / "flash_kda.h").is_file()
    assert list(root.parents[1].glob("libflash_kda.a"))
    assert pathlib.Path(flash_kda.__file__).with_name("py.typed").is_file()


def test_other_threads_run_during_a_call():
    """The GIL is released: a second thread makes steps while one call is under way."""
    p = problem(BF16, B=1, T=6000, H=2, HV=4, K=128, V=128)
    times: list[float] = []
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            times.append(time.perf_counter())
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    time.sleep(0.01)
    start = time.perf_counter()
    p.chunk_kda(threads=1)
    end = time.perf_counter()
    stop.set()
    ticker.join()
    inside = [t for t in times if start < t < end]
    assert end - start > 0.005, "the call is too short to tell"
    assert len(inside) >= 3, f"{len(inside)} steps in {end - start:.3f} s"
