"""The GPU benchmark's frame, as far as no GPU is needed."""

from __future__ import annotations

import contextlib
import json
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
    oracle,
    providers,
    render,
    run,
    timing,
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


def test_accuracy_sees_a_wrong_provider():
    class Wrong(providers.FlashKda):
        name = "wrong"

        def prepare(self, inputs):
            call = super().prepare(inputs.but(g=inputs.g[:, :, :1].expand_as(inputs.g).clone()))
            return lambda: call()

    rows = accuracy.rows([providers.FlashKda(), Wrong()], 2, "cpu", most_tokens=64)
    assert len(rows) == 2 * len(accuracy.INPUTS)
    assert max(row["out"] for row in rows if row["provider"] == "flash_kda") < 5e-3
    wrong = {row["input"]: row for row in rows if row["provider"] == "wrong"}
    assert wrong["default"]["out"] > 0.1


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
    times = timing.measure(calls, method, 4, "cuda")
    assert times == {"a": pytest.approx([1.0] * 4), "b": pytest.approx([2.0] * 4)}
    rounds = [gpu.log[i : i + 4] for i in range(0, len(gpu.log), 4)]
    assert len(rounds) == 2 * (4 + 3)
    for flush, begin, work, end in rounds:
        assert (flush, begin, end) == ("flush", "event", "event")
        assert work in calls


def test_unknown_method():
    with pytest.raises(ValueError, match="graph"):
        timing.measure({}, "graph", 1, "cpu")


# --- providers, record, page ----------------------------------------------------------------------


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


def test_run_writes_the_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(cases.CASES, SMALL.name, SMALL)
    path = tmp_path / "cpu.json"
    arguments = ["--device", "cpu", "--cases", "small", "--reps", "3", "--accuracy-tokens", "40"]
    assert run.main([*arguments, "--commit", "c0ffee", "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    keys = ["gpu", "driver", "cuda", "torch", "commit", "kernel_digest", "results", "accuracy"]
    assert list(record) == keys
    assert record["commit"] == "c0ffee"
    row = record["results"][0]
    assert list(row) == ["case", "provider", "method", "state", "median_ms", "p20_ms", "p80_ms"]
    assert (row["case"], row["provider"], row["method"]) == ("small", "flash_kda", "eager")
    assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
    assert [list(row) for row in record["accuracy"]] == [["input", "provider", "out", "state"]] * 5
    assert "flash_kda ms" in capsys.readouterr().out


def test_run_keeps_what_ran(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(cases.CASES, SMALL.name, SMALL)

    class Broken(providers.FlashKda):
        name = "broken"

        def prepare(self, inputs):
            raise RuntimeError("out of luck")

    monkeypatch.setitem(providers.PROVIDERS, "broken", Broken())
    path = tmp_path / "cpu.json"
    arguments = ["--device", "cpu", "--cases", "small", "--reps", "2", "--no-accuracy"]
    chosen = ["--providers", "broken", "flash_kda"]
    assert run.main([*arguments, *chosen, "--out", str(path)]) == 1
    assert "out of luck" in capsys.readouterr().err
    assert [row["provider"] for row in json.loads(path.read_text())["results"]] == ["flash_kda"]


@pytest.mark.parametrize(
    "wrong", [["--cases", "none-such"], ["--providers", "none-such"]], ids=["case", "provider"]
)
def test_run_names_what_is_wrong(wrong, capsys):
    assert run.main(["--device", "cpu", *wrong]) == 2
    assert "none-such" in capsys.readouterr().err


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
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["h200_accuracy.png", "h200_speed.png"]
    assert render.main(arguments) == 0
    assert page.read_text() == text, "rendering again changes nothing"


def test_render_needs_its_marks(tmp_path, capsys):
    source, page = tmp_path / "h200.json", tmp_path / "page.md"
    source.write_text(json.dumps(record_of({}, {})))
    page.write_text("no marks\n")
    assert render.main([str(source), "--page", str(page), "--plots", str(tmp_path)]) == 2
    assert "bench:source" in capsys.readouterr().err
