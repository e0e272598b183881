"""Options, the device fixture and the count of exact-match cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from functools import cache

import pytest

_EXACT_CASES: pytest.StashKey[Counter[str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flash_kda")
    group.addoption(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where tests with a device run; auto: the CPU, and a GPU if there is one",
    )
    group.addoption("--full", action="store_true", help="named inputs and exact cases at full size")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_EXACT_CASES] = Counter()
    config.addinivalue_line(
        "markers",
        "skip_if_not_served: on a GPU, the backend's word that it does not serve the call skips",
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skips tests so marked, with the reason, where the GPU backend does not serve their call."""
    try:
        return (yield)
    except NotImplementedError as error:
        from flash_kda.inputs.checker import not_served

        device = str(pyfuncitem.funcargs.get("device", "cpu"))
        marked = pyfuncitem.get_closest_marker("skip_if_not_served")
        if marked is None or not not_served(error, device):
            raise
        pytest.skip(str(error))


@cache
def why_no_cuda() -> str:
    """Empty if the CUDA backend can run here."""
    import flash_kda

    for backend in flash_kda.backends():
        if backend.name.startswith("cuda"):
            return "" if backend.available else f"no GPU test: {backend.detail}"
    return "no GPU test: this build has no CUDA backend"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.getoption("--device")
    devices = ["cpu", "cuda"] if wanted == "auto" else [wanted]
    skip = [pytest.mark.skipif(bool(why_no_cuda()), reason=why_no_cuda())]
    marks = {"cpu": [], "cuda": skip if wanted == "auto" else []}
    metafunc.parametrize("device", [pytest.param(d, marks=marks[d]) for d in devices])


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> str:
    """For tests that mean nothing without a GPU."""
    reason = why_no_cuda()
    if reason and request.config.getoption("--device") != "cuda":
        pytest.skip(reason)
    if request.config.getoption("--device") == "cpu":
        pytest.skip("a GPU test, and --device cpu")
    assert not reason
    return "cuda"


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the long versions are asked for."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def exact_cases(request: pytest.FixtureRequest) -> Counter[str]:
    """Counts the exact-match cases that agreed, by tier and device."""
    return request.config.stash[_EXACT_CASES]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    counts = config.stash[_EXACT_CASES]
    if counts:
        parts = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
        agreed = sum(n for kind, n in counts.items() if not kind.startswith("refused"))
        terminalreporter.write_line(f"exact-match cases: {agreed} ({parts})")
