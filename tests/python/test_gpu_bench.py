"""The GPU benchmark's frame, as far as no GPU is needed."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks/gpu").is_dir():
    pytest.skip("no benchmarks beside the tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import (  # noqa: E402
    accuracy,
    cases,
    data,
    environment,
    fla_tuning,
    host,
    oracle,
    providers,
    record,
    render,
    run,
    sweep,
    timing,
    watch,
)

import flash_kda  # noqa: E402
from flash_kda.reference import recurrent_kda  # noqa: E402

SMALL = cases.Case("small", (5, 0, 40), 2)


def test_headline_cases():
    assert [case.name for case in cases.select(["headline"])] == [
        "fixed-8192-h96",
        "mixed-8192-h96",
        "uniform-8x1024-h96",
        "fixed-8192-h64",
        "mixed-8192-h64",
        "uniform-8x1024-h64",
    ]
    assert {case.tokens for case in cases.GROUPS["headline"]} == {8192}
    assert cases.CASES["mixed-8192-h96"].lengths == (1300, 547, 2048, 963, 271, 3063)
    # 5 rows of 256 bytes and beta, for 8192 tokens and 96 heads, and two states a head
    assert cases.CASES["fixed-8192-h96"].least_bytes == 8192 * 96 * 1282 + 2 * 96 * 65536


def test_states_of_a_case():
    lengths = (5, 40)
    half = data.random_inputs(cases.Case("half", lengths, 2, "bf16"), "cpu")
    assert (half.initial_state.dtype, half.final_state) == (torch.bfloat16, torch.bfloat16)
    none = data.random_inputs(cases.Case("none", lengths, 2, "none"), "cpu")
    assert (none.initial_state, none.final_state) == (None, None)
    assert providers.FlashKda().prepare(none)()[1] is None
    _, final = providers.FlashKda().prepare(half)()
    assert final.dtype == torch.bfloat16
    assert bool(final.isfinite().all())
    size = {s: cases.Case(s, lengths, 2, s).least_bytes for s in ("fp32", "bf16", "none")}
    assert size["fp32"] - size["none"] == 2 * (size["bf16"] - size["none"]) == 2 * 2 * 2 * 65536


def test_the_other_cases_are_all_there():
    named = {case.name: case for group in ("more", "crowds") for case in cases.GROUPS[group]}
    assert set(named) == {
        *(f"fixed-8192-h{heads}" for heads in (32, 16, 8, 4)),
        *("fixed-65536-h8", "fixed-65536-h32", "fixed-131072-h4", "fixed-1048576-h1"),
        *("uniform-128x64-h32", "fixed-1024-h32", "fixed-128-h32", "crowd-4096x32-h32"),
        *("crowd-70000x0-3-h8", "contrast-1000x-h32"),
    }
    assert {name for name, case in named.items() if case.states == "none"} == {
        "crowd-4096x32-h32",
        "crowd-70000x0-3-h8",
    }
    assert named["uniform-128x64-h32"].states == "bf16"
    assert named["crowd-4096x32-h32"].tokens == 131072
    lengths = named["contrast-1000x-h32"].lengths
    assert max(lengths) == 1000 * min(lengths)
    assert set(named["crowd-70000x0-3-h8"].lengths) == {0, 1, 2, 3}
    assert len(named["crowd-70000x0-3-h8"].lengths) == 70000


def test_cases_by_head_count():
    heads = [case.heads for case in cases.select(["all"])]
    assert heads == sorted(heads, reverse=True)
    with pytest.raises(ValueError, match="fixed-8192-h95"):
        cases.select(["fixed-8192-h95"])


def test_random_inputs():
    a, b = (data.random_inputs(SMALL, "cpu") for _ in range(2))
    assert torch.equal(a.q, b.q)
    assert not torch.equal(a.q, a.k)
    assert a.cu_seqlens.tolist() == [0, 5, 5, 45]
    assert a.initial_state.shape == (3, 2, 128, 128)
    assert (a.initial_state.dtype, a.final_state) == (torch.float32, torch.float32)
    assert 0.9 < float(a.v.float().std()) < 1.1
    assert 0.0 <= float(a.A_log.min()) <= float(a.A_log.max()) < 0.5


@pytest.mark.parametrize("name", accuracy.INPUTS)
def test_oracle_is_the_reference(name):
    inputs = accuracy.INPUTS[name][0](3, 70, "cpu")
    out, state = oracle.recurrence(inputs)
    arrays = [x.float().numpy() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)]
    initial = inputs.initial_state
    want, final, *_ = recurrent_kda(
        *arrays,
        A_log=inputs.A_log.numpy(),
        dt_bias=inputs.dt_bias.numpy(),
        initial_state=None if initial is None else initial.numpy(),
    )
    np.testing.assert_allclose(out.numpy(), want[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state.numpy(), final[0], rtol=1e-9, atol=1e-12)


def test_accuracy_inputs_are_what_they_are_called():
    keys = accuracy.near_parallel_keys(2, 400, "cpu").k[0].double()
    unit = keys / keys.norm(dim=-1, keepdim=True)
    cosine = torch.einsum("shd,thd->hst", unit, unit)
    off = cosine[:, ~torch.eye(400, dtype=torch.bool)]
    assert 0.94 < float(off.mean()) < 0.96
    same = accuracy.identical_keys(2, 64, "cpu")
    assert torch.equal(same.k, same.k[:, :1].expand_as(same.k))
    assert not torch.equal(same.k[:, :, 0], same.k[:, :, 1])
    assert torch.equal(same.v[:, :16], same.v[:, 16:32])
    gates = accuracy.saturated_gate(3, 64, "cpu").g[0]
    assert bool((gates[:, 0] == 20).all())
    assert bool((gates[:, 1, 1::2] == -60).all())
    assert bool((gates[:16, 2] == 20).all())
    assert bool((gates[16:32, 2] == -60).all())


def test_worst_relative_rms():
    reference = torch.ones(10, 3, 4, dtype=torch.float64)
    x = reference.clone()
    x[:, 1] *= 1.5
    assert oracle.worst_relative_rms(x, reference, head_dim=1) == pytest.approx(0.5)
    x[0, 2, 0] = torch.nan
    assert oracle.worst_relative_rms(x, reference, head_dim=1) == float("inf")


@pytest.mark.parametrize("name", accuracy.INPUTS)
def test_accuracy_sees_a_wrong_provider(name):
    inputs = accuracy.INPUTS[name][0](2, 64, "cpu")
    expected = oracle.recurrence(inputs)
    right = accuracy.row(name, "right", providers.FlashKda().prepare(inputs)(), expected)
    assert right["input"] == name
    assert max(right["out"], right["state"]) < 5e-3
    one_head = inputs.but(v=inputs.v[:, :, :1].expand_as(inputs.v).clone())
    wrong = accuracy.row(name, "wrong", providers.FlashKda().prepare(one_head)(), expected)
    assert min(wrong["out"], wrong["state"]) > 0.1


# --- timing ---------------------------------------------------------------------------------------


def test_turns_rotate():
    order = [name for _, name in timing.turns(["a", "b", "c"], 3)]
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_quantiles():
    q = timing.quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert (q.p20, q.median, q.p80) == pytest.approx((2.0, 3.5, 5.0))


def trace(*work):
    """(name, begin, length, category) in microseconds, in a shuffled order."""
    events = [
        {"name": name, "ts": begin, "dur": length, "cat": cat} for name, begin, length, cat in work
    ]
    noise = [{"name": "python", "ts": 0, "dur": 900, "cat": "cpu_op"}, {"name": "meta", "ph": "M"}]
    return [*events[::-1], *noise]


def test_busy_time_of_each_call():
    events = trace(
        ("before", 0, 7, "kernel"),
        ("bitwise_not_kernel", 10, 5, "kernel"),
        ("order", 20, 4, "kernel"),
        ("forward", 22, 10, "kernel"),  # overlaps: launched before the other has ended
        ("bitwise_not_kernel", 40, 5, "kernel"),
        ("Memset", 50, 1, "gpu_memset"),
        ("a", 55, 2, "kernel"),
        ("user range", 40, 100, "gpu_user_annotation"),
        ("b", 60, 3, "kernel"),
    )
    assert timing.busy_by_call(events, 2) == pytest.approx([12e-3, 6e-3])
    with pytest.raises(RuntimeError, match="expected 3 flushes"):
        timing.busy_by_call(events, 3)
    with pytest.raises(RuntimeError, match="1 have none"):
        timing.busy_by_call(trace(("bitwise_not_kernel", 10, 5, "kernel")), 1)


class FakeGpu:
    """A device whose clock moves when work is run: stands in for torch.cuda."""

    def __init__(self, monkeypatch):
        self.now, self.log, self.recording = 0.0, [], None
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = fake.now
                fake.log.append("event")

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        class Graph:
            def replay(self):
                for name, ms in self.work:
                    fake.work(name, ms)

        @contextlib.contextmanager
        def capture(graph):
            fake.recording = []
            yield
            graph.work, fake.recording = fake.recording, None

        buffer = types.SimpleNamespace(bitwise_not_=lambda: fake.work("flush", 0.1))
        monkeypatch.setattr(timing, "_flush_buffer", lambda: buffer)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def work(self, name, ms):
        if self.recording is not None:
            self.recording.append((name, ms))
            return
        self.now += ms
        self.log.append(name)


@pytest.mark.parametrize("method", ["graph", "eager"])
def test_each_timed_call_follows_a_flush(monkeypatch, method):
    gpu = FakeGpu(monkeypatch)
    calls = {"a": lambda: gpu.work("a", 1.0), "b": lambda: gpu.work("b", 2.0)}
    if method == "graph":
        calls = {name: timing.captured(call) for name, call in calls.items()}
        assert not gpu.log, "a capture runs nothing"
    times = timing.measure(calls, method, 4, "cuda")
    assert times == {"a": pytest.approx([1.0] * 4), "b": pytest.approx([2.0] * 4)}
    rounds = [gpu.log[i : i + 4] for i in range(0, len(gpu.log), 4)]
    assert len(rounds) == 2 * (4 + 3)
    for flush, begin, work, end in rounds:
        assert (flush, begin, end) == ("flush", "event", "event")
        assert work in ("a", "b")


def test_unknown_method():
    with pytest.raises(ValueError, match="graph"):
        timing.measure({}, "graph", 1, "cpu")


# --- providers, record ----------------------------------------------------------------------------


def test_fla_is_called_as_its_layer_calls_it(monkeypatch):
    seen = {}

    def chunk_kda(**arguments):
        seen.update(arguments)
        return arguments["v"], arguments["initial_state"]

    fla = types.ModuleType("fla.ops.kda")
    fla.chunk_kda = chunk_kda
    monkeypatch.setitem(sys.modules, "fla.ops.kda", fla)
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    inputs = data.random_inputs(SMALL, "cpu")
    out, final = providers.FlaTriton().prepare(inputs)()
    assert out is inputs.v
    assert final is inputs.initial_state
    assert providers.os.environ["FLA_FLASH_KDA"] == "0", "it would hand the call to us"
    assert seen["cu_seqlens"] is inputs.cu_seqlens, "a copy would lose fla's chunk tables"
    switches = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    assert all(seen[name] is True for name in (*switches, "safe_gate", "state_v_first"))
    assert seen["output_final_state"] is True
    assert seen["lower_bound"] == -5.0
    assert seen["dt_bias"].shape == (256,)
    names = set(flash_kda.chunk_kda.__code__.co_varnames)
    assert set(seen) <= names, "ours takes the same names"


def test_digest_follows_the_kernels(tmp_path):
    for name in ("src/cuda/sm90/a.cu", "include/flash_kda/b.h"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    first = environment.kernel_digest(tmp_path)
    assert first == environment.kernel_digest(tmp_path)
    assert len(first) == 64
    (tmp_path / "src/other.cpp").write_text("not a kernel")
    assert environment.kernel_digest(tmp_path) == first
    (tmp_path / "src/cuda/sm90/a.cu").write_text("changed")
    assert environment.kernel_digest(tmp_path) != first


def test_file_stem():
    assert environment.file_stem("NVIDIA H200") == "h200"
    assert environment.file_stem("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


# --- the run, its worker, its limits --------------------------------------------------------------

PLUGIN = """
import os, time, threading
from benchmarks.gpu import cases, providers

for name, lengths in {"small": (5, 0, 40), "small2": (7,)}.items():
    cases.CASES[name] = cases.Case(name, lengths, 2)

class Fails(providers.FlashKda):
    name = "fails"
    def prepare(self, inputs):
        raise RuntimeError("out of luck")

class Hangs(providers.FlashKda):
    name = "hangs"
    def prepare(self, inputs):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # no signal handler of Python's runs from here on

class Dies(providers.FlashKda):
    name = "dies"
    def prepare(self, inputs):
        os.kill(os.getpid(), 11)

class DiesLate(providers.FlashKda):
    name = "dies_late"
    def prepare(self, inputs):
        call, calls = super().prepare(inputs), []
        def run():
            calls.append(1)
            if len(calls) > 4:
                os._exit(9)
            return call()
        return run

class NoImport(providers.FlashKda):
    name = "no_import"
    def version(self):
        raise ImportError("a symbol is missing")

class FailsLate(providers.FlashKda):
    name = "fails_late"
    def prepare(self, inputs):
        call, calls = super().prepare(inputs), []
        def run():
            calls.append(1)
            if len(calls) > 4:
                raise RuntimeError("out of luck")
            return call()
        return run

for kind in (Fails, FailsLate, Hangs, Dies, DiesLate, NoImport):
    providers.PROVIDERS[kind.name] = kind()
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the benchmark on the CPU with providers that misbehave; status and record."""
    (tmp_path / "misbehaving.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(cases, "CASES", dict(cases.CASES))
    monkeypatch.setattr(providers, "PROVIDERS", dict(providers.PROVIDERS))
    monkeypatch.delitem(sys.modules, "misbehaving", raising=False)
    path = tmp_path / "cpu.json"

    def call(*arguments, chosen=("small",)):
        common = ["--device", "cpu", "--rounds", "3", "--commit", "c0ffee", "--out", str(path)]
        more = ["--plugin", "misbehaving", "--cases", *chosen, *arguments]
        if "--providers" not in arguments:
            more += ["--providers", "flash_kda"]
        status = run.main([*common, *more])
        return status, json.loads(path.read_text())

    return call


def results_of(written):
    return [(row["case"], row["provider"]) for row in written["results"]]


def skipped_of(written):
    return [(row["case"], row["provider"], row["step"]) for row in written["skipped"]]


def test_run_writes_the_record(bench, capfd):
    status, written = bench("--accuracy-tokens", "40")
    assert status == 0
    keys = ["gpu", "driver", "cuda", "torch", "commit", "kernel_digest", "results", "accuracy"]
    assert list(written) == keys
    assert written["commit"] == "c0ffee"
    row = written["results"][0]
    assert list(row) == ["case", "provider", "method", "state", "median_ms", "p20_ms", "p80_ms"]
    named = (row["case"], row["provider"], row["method"], row["state"])
    assert named == ("small", "flash_kda", "eager", "fp32")
    assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
    assert [list(row) for row in written["accuracy"]] == [["input", "provider", "out", "state"]] * 5
    out = capfd.readouterr().out
    assert "flash_kda ms" in out
    assert "s] small, flash_kda, first call ..." in out


def test_a_failing_provider_costs_itself_alone(bench, capfd):
    chosen = ("--providers", "fails", "flash_kda", "--no-accuracy")
    status, written = bench(*chosen, chosen=("small", "small2"))
    assert status == 1
    assert results_of(written) == [("small", "flash_kda"), ("small2", "flash_kda")]
    assert skipped_of(written) == [(c, "fails", "first call") for c in ("small", "small2")]
    assert "out of luck" in written["skipped"][0]["reason"]
    assert "Traceback" in capfd.readouterr().err


def test_a_hanging_provider_is_ended(bench):
    chosen = ("--providers", "flash_kda", "hangs", "--no-accuracy", "--peer-limit", "2")
    status, written = bench(*chosen, chosen=("small", "small2", "fixed-128-h32"))
    assert status == 1
    names = ["fixed-128-h32", "small", "small2"]
    assert sorted(results_of(written)) == [(name, "flash_kda") for name in names]
    # Twice is enough: the last case is not made to wait.
    assert len(skipped_of(written)) == 2
    assert {row["reason"] for row in written["skipped"]} == {"took more than 2 s"}


@pytest.mark.parametrize(
    ("provider", "step", "reason"),
    [
        ("dies", "first call", "worker's status -11"),
        ("dies_late", "eager", "worker's status 9"),
        ("fails_late", "eager", "RuntimeError: out of luck"),
    ],
)
def test_a_faulty_peer_does_not_cost_our_figures(bench, provider, step, reason):
    chosen = ("--providers", provider, "flash_kda", "--no-accuracy")
    code, written = bench(*chosen, chosen=("small", "small2"))
    assert code == 1
    assert [name for _, _, name in skipped_of(written)] == [step] * 2
    assert {row["reason"] for row in written["skipped"]} == {reason}
    assert results_of(written) == [("small", "flash_kda"), ("small2", "flash_kda")]


def test_a_provider_that_cannot_be_imported(bench):
    status, written = bench("--providers", "no_import", "flash_kda", "--no-accuracy")
    assert status == 1
    assert results_of(written) == [("small", "flash_kda")]
    assert skipped_of(written) == [("all", "no_import", "import")]


def test_the_budget_ends_the_run(bench):
    chosen = ("--providers", "hangs", "--no-accuracy", "--peer-limit", "50", "--budget", "4")
    start = watch.time.monotonic()
    status, written = bench(*chosen, chosen=("small", "small2"))
    assert status == 1
    assert written["results"] == []
    assert {row["reason"] for row in written["skipped"]} == {"the budget of time is spent"}
    assert watch.time.monotonic() - start < 30


def test_merge_keeps_other_cases(bench):
    bench("--providers", "fails", "flash_kda", "--no-accuracy")
    status, written = bench("--no-accuracy", "--merge", chosen=("small2",))
    assert status == 0
    assert results_of(written) == [("small", "flash_kda"), ("small2", "flash_kda")]
    assert len(written["skipped"]) == 1
    before = written["results"][0]["median_ms"]
    status, written = bench("--no-accuracy", "--merge")
    assert sorted(results_of(written)) == [("small", "flash_kda"), ("small2", "flash_kda")]
    assert written["skipped"] == [], "it is run again"
    assert written["results"][-1]["median_ms"] != before


def test_merge_refuses_other_kernels(bench, monkeypatch, capsys):
    bench("--no-accuracy")
    monkeypatch.setattr(environment, "kernel_digest", lambda: "0" * 64)
    assert bench("--no-accuracy", "--merge")[0] == 2
    assert "kernel_digest" in capsys.readouterr().err
    assert bench("--no-accuracy")[0] == 0, "without --merge the file is a new one"


def test_a_worker_that_never_starts(tmp_path, capsys):
    events = []
    options = {"step_limit": 5.0, "providers": [], "methods": []}
    tasks = [{"kind": "case", "name": "x", "without": []}]
    watching = watch.Watch(tasks, options, events.append, watch.time.monotonic(), 60.0)
    watching.run([sys.executable, "-c", "raise SystemExit(3)"], {})
    (event,) = events
    assert event["rows"][0]["reason"] == "the worker ends before any step"
    assert "status 3 outside a step" in capsys.readouterr().out


def test_commands_run_at_once_within_a_limit():
    def command(code):
        return [sys.executable, "-c", code]

    start = watch.time.monotonic()
    commands = [command("pass"), command("import sys; sys.exit('no compiler')")]
    assert watch.run_all(commands, 60.0, {}) == (1, "1: no compiler")
    commands = [command("import time; time.sleep(100)")] * 2
    assert watch.run_all(commands, 1.0, {}) == (0, "over its limit: ")
    assert watch.time.monotonic() - start < 50


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["told", "killed"])
def test_the_worker_ends_with_its_watcher(tmp_path, how):
    (tmp_path / "misbehaving.py").write_text(PLUGIN)
    command = [sys.executable, "-u", "-m", "benchmarks.gpu.run", "--device", "cpu"]
    command += ["--plugin", "misbehaving", "--cases", "small", "--providers", "hangs"]
    command += ["--no-accuracy", "--out", str(tmp_path / "out.json"), "--peer-limit", "300"]
    where = {**providers.os.environ, "PYTHONPATH": str(tmp_path)}
    running = subprocess.Popen(command, cwd=ROOT, env=where, stdout=subprocess.PIPE, text=True)
    for line in running.stdout:
        if "first call" in line:
            break
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    if not children.exists():
        running.terminate()
        pytest.skip("this kernel does not list children")
    (worker,) = children.read_text().split()
    running.send_signal(how)
    assert running.wait(timeout=60) == {signal.SIGTERM: 128 + 15, signal.SIGKILL: -9}[how]
    deadline = watch.time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and watch.time.monotonic() < deadline:
        watch.time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


def test_write_is_one_step(tmp_path):
    path = tmp_path / "r.json"
    record.write(path, {"a": 1})
    with pytest.raises(TypeError):
        record.write(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_listing(capsys):
    assert run.main(["--device", "cpu", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cases.CASES)
    assert "131072 tokens, 4096 sequences, 32 heads, states none" in out


@pytest.mark.parametrize(
    "wrong",
    [["--cases", "none-such"], ["--providers", "none-such"], ["--methods", "none-such"]],
    ids=["case", "provider", "method"],
)
def test_run_names_what_is_wrong(wrong, capsys):
    assert run.main(["--device", "cpu", *wrong]) == 2
    assert "none-such" in capsys.readouterr().err


# --- host time and fla's tuning -------------------------------------------------------------------


def test_host_time_needs_a_busy_device():
    calls = []
    us = host.microseconds(lambda: calls.append(1), 50, lambda: lambda: False)
    assert 0 < us < 1000
    assert len(calls) == 3 + 7 * 50
    with pytest.raises(RuntimeError, match="out of work"):
        host.microseconds(lambda: None, 5, lambda: lambda: True)


def test_tuning_keys():
    keys = fla_tuning.keys(cases.select(["headline"]))
    assert keys == [
        "96/fixed/fp32/786432",
        "96/packed/fp32/786432",
        "64/fixed/fp32/524288",
        "64/packed/fp32/524288",
    ]
    case, rows = fla_tuning.tiny("64/packed/bf16/524288")
    assert (case.heads, case.packed, case.states, rows) == (64, True, "bf16", 524288)
    assert case.tokens < 1000


def test_choices_are_kept_for_the_same_gpu(tmp_path):
    entry = {"autotune_key": [96], "config": {"num_warps": 4}}
    kept = {"kernel": {"one": entry}}
    fla_tuning.merge(kept, {"kernel": {"two": entry}, "other": {"one": entry}})
    path = tmp_path / "choices.json"
    record.write(path, {"gpu": "A", "kernels": kept})
    assert fla_tuning.load(path, "A") == kept
    assert fla_tuning.load(path, "B") == {}
    assert fla_tuning.load(tmp_path / "none.json", "A") == {}
    where = fla_tuning.unpack(kept, tmp_path / "configs")
    assert where["FLA_CACHE_MODE"] == "strict"
    files = {p.name: json.loads(p.read_text()) for p in (tmp_path / "configs").iterdir()}
    assert set(files) == {"kernel.json", "other.json"}
    assert set(files["kernel.json"]["autotune_entries"]) == {"one", "two"}


# --- sweep of the plan's choices ------------------------------------------------------------------


def test_sweep_covers_the_range():
    grid = sweep.shapes()
    assert len(set(grid)) == len(grid)
    assert 150 < len(grid) < 250, "about 100 s"
    for name, least, most in (("tokens", 128, 262144), ("heads", 1, 96), ("sequences", 1, 4096)):
        values = {getattr(shape, name) for shape in grid}
        assert (min(values), max(values)) == (least, most)
    assert max(shape.tokens * shape.heads for shape in grid) <= sweep.MOST_TOKEN_HEADS
    assert grid == sweep.shapes(), "the same order each time"


def sweep_rows(tokens, times, chosen):
    return [
        {"tokens": tokens, "heads": 1, "sequences": 1, "choice": c, "median_ms": ms,
         "chosen": c == chosen}
        for c, ms in times.items()
    ]  # fmt: skip


def test_sweep_summary():
    rows = sweep_rows(128, {"a": 2.0, "b": 1.0, "c": 4.0}, "a")
    rows += sweep_rows(256, {"a": 1.05, "b": 1.0}, "a") + sweep_rows(512, {"a": 1.0}, "a")
    found = sweep.summary(rows)
    assert (found["shapes"], found["worst_ratio"], found["above_1.1"]) == (3, 2.0, 1)
    worst = found["worst"][0]
    assert (worst["tokens"], worst["ratio"], worst["best"]) == (128, 2.0, "b")
    with pytest.raises(ValueError, match=r"\(128, 1, 1\)"):
        sweep.summary(sweep_rows(128, {"a": 2.0}, "none"))


def test_sweep_takes_each_plan_once(monkeypatch):
    seen = []

    def plan_forward(*arrays, value_split=0, sequence_split=True, **_):
        if value_split == 2:
            raise NotImplementedError("value_split 2")
        segments = 4 if sequence_split else 1
        return types.SimpleNamespace(value_split=1, sequence_segments=segments, grid=7)

    monkeypatch.setattr(flash_kda, "plan_forward", plan_forward)
    monkeypatch.setattr(flash_kda, "chunk_kda", lambda *_, **options: seen.append(options))
    shape = sweep.Shape(64, 2, 2)
    choices = sweep.Calls([shape], "cpu").choices(shape)
    assert [(label, choice.chosen) for label, choice in choices.items()] == [
        ("value split 1, segments 4, grid 7", True),
        ("value split 1, segments 1, grid 7", False),
    ]
    for choice in choices.values():
        choice.call()
    assert [(o["value_split"], o["sequence_split"]) for o in seen] == [(0, True), (0, False)]
    assert seen[0]["cu_seqlens"].tolist() == [0, 32, 64]
    assert seen[0]["final_state"].shape == (2, 2, 128, 128)


def test_sweep_writes_rows_and_summary(tmp_path, capsys):
    path = tmp_path / "cpu.json"
    grid = [sweep.Shape(64, 2, 1), sweep.Shape(64, 2, 4), sweep.Shape(32, 1, 2)]
    record.write(path, {"gpu": "none (cpu)", "kernel_digest": environment.kernel_digest(),
                        "results": [{"case": "kept"}]})  # fmt: skip
    arguments = ["--device", "cpu", "--rounds", "2", "--commit", "c0ffee", "--out", str(path)]
    assert sweep.main([*arguments, "--merge"], grid) == 0
    written = json.loads(path.read_text())
    assert written["results"] == [{"case": "kept"}]
    shapes = [(row["tokens"], row["heads"], row["sequences"]) for row in written["sweep"]]
    assert shapes == [(64, 2, 1), (64, 2, 4), (32, 1, 2)]
    assert all(row["chosen"] and row["median_ms"] > 0 for row in written["sweep"])
    assert written["sweep_summary"]["worst_ratio"] == 1.0
    assert "worst ratio default/best 1.0" in capsys.readouterr().out
    assert sweep.main([*arguments, "--merge", "--budget", "0"], grid) == 1, "nothing was measured"
    before = path.read_text()
    assert sweep.main(arguments, grid) == 2, "the file's other rows would be lost"
    assert path.read_text() == before
    assert "--merge" in capsys.readouterr().err


# --- page -----------------------------------------------------------------------------------------


def record_of(times, errors):
    results = [
        {
            "case": case,
            "provider": provider,
            "method": method,
            "state": "fp32",
            "median_ms": ms,
            "p20_ms": 0.9 * ms,
            "p80_ms": 1.1 * ms,
        }
        for (case, provider, method), ms in times.items()
    ]
    rows = [
        {"input": name, "provider": provider, "out": out, "state": state}
        for (name, provider), (out, state) in errors.items()
    ]
    where = {"gpu": "NVIDIA H200", "driver": "1", "cuda": "2", "torch": "3", "commit": "4" * 40}
    return {**where, "kernel_digest": "5" * 64, "results": results, "accuracy": rows}


def test_render(tmp_path):
    times = {
        ("fixed-8192-h96", "fla_triton", "graph"): 2.0,
        ("fixed-8192-h96", "flash_kda", "graph"): 0.5,
        ("fixed-8192-h96", "flash_kda", "eager"): 0.6,
        ("fixed-8192-h64", "flash_kda", "graph"): 0.25,
    }
    errors = {("default", "flash_kda"): (4.1e-3, 2.7e-3), ("default", "fla_triton"): (5e-3, 6e-3)}
    source, page = tmp_path / "h200.json", tmp_path / "page.md"
    source.write_text(json.dumps(record_of(times, errors)))
    page.write_text((ROOT / "docs/performance.md").read_text() + "\nthe log\n")
    arguments = [str(source), "--page", str(page), "--plots", str(tmp_path / "plots")]
    assert render.main(arguments) == 0
    text = page.read_text()
    assert "| `fixed-8192-h96` | 0.500 | 0.450 to 0.550 | 2.04 | 2.000 | 4.0 |" in text
    assert "| `fixed-8192-h64` | 0.250 | 0.225 to 0.275 | 2.72 | - | - |" in text
    assert "| default | 4.1e-03 | 2.7e-03 | 5.0e-03 | 6.0e-03 |" in text
    assert "NVIDIA H200, driver 1, CUDA 2, torch 3, commit `444444444444`" in text
    assert "(changed since)" in text
    assert text.endswith("\nthe log\n")
    # The other cases, where there are some, have a plot of their own: their times differ 1000-fold.
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["h200_accuracy.png", "h200_speed.png"]
    assert render.main(arguments) == 0
    assert page.read_text() == text, "rendering again changes nothing"


def test_render_draws_other_cases_apart(tmp_path):
    times = {("fixed-8192-h96", "flash_kda", "graph"): 0.5, ("fixed-128-h32", "p", "graph"): 0.01}
    drawn = render.draw(record_of(times, {}), tmp_path)
    assert [path.name for path in drawn] == ["h200_speed.png", "h200_speed_more.png"]


def test_render_of_the_other_parts(tmp_path):
    rows = sweep_rows(128, {"a": 2.0, "b": 1.0}, "a") + sweep_rows(256, {"a": 1.0}, "a")
    written = record_of({("uniform-128x64-h32", "fla_triton", "graph"): 2.0}, {})
    written["results"][0]["state"] = "bf16 in, fp32 out"
    nothing = render.sections(written)
    assert "Not measured" in nothing["host"]
    assert "Not measured" in nothing["sweep"]
    assert nothing["skipped"] == "Nothing was left out."
    reason = {"case": "c", "provider": None, "step": "graph", "reason": "took more than 2 s"}
    written |= {"host": [{"call": "fwd", "us": 5.25}], "sweep": rows, "skipped": [reason]}
    written["sweep_summary"] = sweep.summary(rows)
    parts = render.sections(written)
    assert "| fwd | 5.2 |" in parts["host"]
    assert "2 shapes; the plan's own choice takes at most 2.00 times" in parts["sweep"]
    assert "| 128 | 1 | 1 | 2.00 | b |" in parts["sweep"]
    assert "| 256 |" not in parts["sweep"], "there it takes the best"
    assert parts["skipped"] == "- c, all, graph: took more than 2 s"
    assert "`uniform-128x64-h32`: flash-linear-attention (Triton) bf16 in" in parts["speed"]


def test_render_needs_its_marks(tmp_path, capsys):
    source, page = tmp_path / "h200.json", tmp_path / "page.md"
    source.write_text(json.dumps(record_of({}, {})))
    page.write_text("no marks\n")
    assert render.main([str(source), "--page", str(page), "--plots", str(tmp_path)]) == 2
    assert "bench:source" in capsys.readouterr().err
