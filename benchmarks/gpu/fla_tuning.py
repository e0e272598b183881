"""Keeps flash-linear-attention's tuning short, and its choices for the next run.

Its seven forward kernels try about 106 configurations for every number of heads (and some again
for packed batches, other states and other totals of rows), each compiled alone and timed for
125 ms: a minute or more in a fresh process. Here

- every configuration is compiled ahead by several processes that launch nothing
  (`python -m benchmarks.gpu.fla_tuning`), into Triton's cache on disk;
- a configuration is timed for 30 ms; a line says which kernel is being tuned;
- the choices go to a file, from which a later run takes them by fla's own FLA_CACHE_MODE=strict:
  for exactly the same key, nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import cases

_WARM_MS, _TIMED_MS = 5, 30
_L2NORM_ROWS = 65536  # fla's l2norm_fwd is tuned anew for each multiple
_TINY = 64  # tokens of the calls that compile: the kernels are not specialised by T

Choices = dict[str, dict[str, Any]]  # kernel -> hash of its key -> {"autotune_key", "config"}


def load(path: Path, gpu: str) -> Choices:
    """The choices of a file; none if there is no file or it is of another GPU."""
    content = json.loads(path.read_text()) if path.exists() else {}
    kernels: Choices = content["kernels"] if content.get("gpu") == gpu else {}
    return kernels


def unpack(kernels: Choices, folder: Path) -> dict[str, str]:
    """Writes fla's own files, one a kernel; returns the environment that makes fla use them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, entries in kernels.items():
        content = {"kernel_name": name, "autotune_entries": entries}
        (folder / f"{name}.json").write_text(json.dumps(content))
    return {"FLA_CACHE_MODE": "strict", "FLA_CONFIG_DIR": str(folder)}


def merge(into: Choices, more: Choices) -> None:
    """Adds the entries of `more`."""
    for name, entries in more.items():
        into.setdefault(name, {}).update(entries)


def _tuners() -> Iterator[Any]:
    from triton.runtime.autotuner import Autotuner

    seen: set[int] = set()
    for name in [name for name in sys.modules if name.startswith("fla.")]:
        for value in list(vars(sys.modules[name]).values()):
            while value is not None and not isinstance(value, Autotuner):
                # Heuristics around the tuner; other objects have no such inner function.
                value = getattr(value, "fn", None) if hasattr(value, "run") else None
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                yield value


def chosen() -> Choices:
    """What the kernels of this process run with, by their tuning keys."""
    from fla.ops.utils.cache import AutotuneKey

    found: Choices = {}
    for tuner in _tuners():
        for key, config in tuner.cache.items():
            entry = {
                "autotune_key": AutotuneKey.normalize_autotune_key(key),
                "config": {
                    "kwargs": config.kwargs,
                    "num_warps": config.num_warps,
                    "num_stages": config.num_stages,
                    "num_ctas": config.num_ctas,
                    "maxnreg": config.maxnreg,
                },
            }
            name = tuner.base_fn.__name__
            found.setdefault(name, {})[AutotuneKey.key_hash(key)] = entry
    return found


def quicken(note: Callable[[str], None]) -> None:
    """Times each configuration shortly, and says which kernel is tuned."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def short(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
        return do_bench(call, warmup=_WARM_MS, rep=_TIMED_MS, quantiles=quantiles)

    prune = Autotuner.prune_configs

    def prune_and_tell(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = prune(self, kwargs)
        note(f"Triton tunes {self.base_fn.__name__}: {len(configs)} configurations")
        return configs

    Autotuner.do_bench = property(lambda _: short)
    Autotuner.prune_configs = prune_and_tell


def compile_only(share: int, shares: int) -> list[int]:
    """Tuned kernels are compiled, not run: every `shares`-th configuration, or the known choice.

    Returns a list whose one element counts the compilations.
    """
    from fla.ops.utils.cache import AutotuneKey
    from triton.runtime.autotuner import Autotuner

    count = [0]

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        key = AutotuneKey.build(self.arg_names, self.keys, args, kwargs).autotune_key
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        known = self.cache.get(key)
        configs = [known] if known else self.prune_configs(kwargs)
        for config in configs[share::shares]:
            options = {**kwargs, **config.all_kwargs(), "warmup": True}
            try:
                self.fn.run(*args, **options)
            except Exception as error:  # one that does not fit is no choice for the tuner either
                print(f"{self.base_fn.__name__} {config}: {error}", file=sys.stderr)
            count[0] += 1

    Autotuner.run = run
    return count


def keys(chosen_cases: Sequence[cases.Case]) -> list[str]:
    """What the tuning of these cases depends on, once each: "heads/packed/states/rows".

    The rows (tokens x heads) are those of the first such case; l2norm_fwd's bucket decides.
    """
    first: dict[tuple[int, bool, str, int], str] = {}
    for case in chosen_cases:
        rows = case.tokens * case.heads
        key = (case.heads, case.packed, case.states, -(-rows // _L2NORM_ROWS))
        packed = "packed" if case.packed else "fixed"
        first.setdefault(key, f"{case.heads}/{packed}/{case.states}/{rows}")
    return list(first.values())


def tiny(key: str) -> tuple[cases.Case, int]:
    """A small case with this tuning key, its rows aside, and the rows."""
    heads, packed, states, rows = key.split("/")
    lengths = (_TINY, _TINY) if packed == "packed" else (_TINY,)
    return cases.Case(key, lengths, int(heads), states), int(rows)


def command(share: int, shares: int, chosen_cases: Sequence[cases.Case]) -> list[str]:
    """The command line of a process that compiles a share of the configurations."""
    numbers = [str(share), str(shares)]
    return [sys.executable, "-m", "benchmarks.gpu.fla_tuning", *numbers, *keys(chosen_cases)]


def main(arguments: Sequence[str], device: str = "cuda") -> int:
    """SHARE SHARES KEY...: compiles this share of what the keys need."""
    share, shares = int(arguments[0]), int(arguments[1])
    os.environ.setdefault("FLA_FLASH_KDA", "0")
    import torch
    from benchmarks.gpu import providers
    from benchmarks.gpu.data import random_inputs
    from fla.modules.norm.l2norm import l2norm_fwd

    count = compile_only(share, shares)
    with torch.no_grad():
        for key in arguments[2:]:
            case, rows = tiny(key)
            providers.FlaTriton().prepare(random_inputs(case, device))()
            l2norm_fwd(torch.empty(rows, cases.HEAD_DIM, dtype=torch.bfloat16, device=device))
    print(f"{count[0]} configurations compiled", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
