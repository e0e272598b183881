"""Implementations of the operator, each as a call on the same `Inputs`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Protocol

import torch
from benchmarks.gpu.data import Inputs

# out [1, T, H, V] bf16 and the final state [N, H, V, K], if asked for.
Output = tuple[torch.Tensor, torch.Tensor | None]
Call = Callable[[], Output]


class Provider(Protocol):
    """One implementation."""

    name: str
    devices: tuple[str, ...]

    def why_not(self) -> str:
        """Why it cannot run here; empty if it can."""

    def version(self) -> str:
        """Of the package, which is imported by that."""

    def states(self, asked: str) -> str:
        """Types of the states in and out, where a case asks for "fp32", "bf16" or "none"."""

    def prepare(self, inputs: Inputs) -> Call:
        """A call of one forward pass. What its users do once is done here, the rest in the call."""


def _sequences(inputs: Inputs) -> int:
    return 1 if inputs.cu_seqlens is None else inputs.cu_seqlens.numel() - 1


class FlashKda:
    """This project, by the call that flash-linear-attention's layer ends up in."""

    name = "flash_kda"
    devices: tuple[str, ...] = ("cpu", "cuda")

    def why_not(self) -> str:
        """Why it cannot run here; empty if it can."""
        return "" if importlib.util.find_spec("flash_kda") else "flash_kda is not installed"

    def version(self) -> str:
        """Of the package."""
        import flash_kda

        return flash_kda.__version__

    def states(self, asked: str) -> str:
        """As asked."""
        return asked

    def prepare(self, inputs: Inputs) -> Call:
        """Outputs are taken once, as an engine does, and hold NaN until a call writes them."""
        import flash_kda

        i = inputs
        _, _, heads, value_dim = i.v.shape
        out = torch.full_like(i.v, torch.nan)
        final = None
        if i.final_state is not None:
            shape = (_sequences(i), heads, value_dim, i.k.shape[-1])
            final = torch.full(shape, torch.nan, dtype=i.final_state, device=i.v.device)

        def call() -> Output:
            flash_kda.fwd(
                i.q, i.k, i.v, i.g, i.beta, None, out, i.A_log, i.dt_bias, i.lower_bound,
                i.initial_state, final, i.cu_seqlens,
            )  # fmt: skip
            return out, final

        return call


class FlaTriton:
    """flash-linear-attention's Triton kernels (package fla-core), as its own layer calls them."""

    name = "fla_triton"
    devices: tuple[str, ...] = ("cuda",)

    def why_not(self) -> str:
        """Why it cannot run here; empty if it can."""
        missing = [name for name in ("fla", "triton") if not importlib.util.find_spec(name)]
        return f"{' and '.join(missing)} not installed" if missing else ""

    def version(self) -> str:
        """Of fla-core, which holds the kernels; importing them takes seconds."""
        importlib.import_module("fla.ops.kda")
        return importlib.metadata.version("fla-core")

    def states(self, asked: str) -> str:
        """The final state is always fp32."""
        return "bf16 in, fp32 out" if asked == "bf16" else asked

    def prepare(self, inputs: Inputs) -> Call:
        """States in [V, K] order and every step in the kernels, as fla's KimiDeltaAttention has it.

        The chunk table of a packed batch, which fla keeps between calls, is not part of the time.
        """
        os.environ["FLA_FLASH_KDA"] = "0"  # or fla would hand the call to us
        chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
        i = inputs
        dt_bias = i.dt_bias.reshape(-1)

        def call() -> Output:
            out, final = chunk_kda(
                q=i.q,
                k=i.k,
                v=i.v,
                g=i.g,
                beta=i.beta,
                A_log=i.A_log,
                dt_bias=dt_bias,
                initial_state=i.initial_state,
                output_final_state=i.final_state is not None,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                safe_gate=True,
                lower_bound=i.lower_bound,
                state_v_first=True,
                cu_seqlens=i.cu_seqlens,
            )
            return out, final

        return call


_ALL: tuple[Provider, ...] = (FlashKda(), FlaTriton())
PROVIDERS: dict[str, Provider] = {p.name: p for p in _ALL}


def select(names: list[str], device: str) -> tuple[list[Provider], dict[str, str]]:
    """The providers of these names (none: all) that can run, and why the others cannot.

    Raises:
        ValueError: A name is not known.
    """
    chosen, refused = [], {}
    for name in names or PROVIDERS:
        if name not in PROVIDERS:
            raise ValueError(f"providers: expected some of {', '.join(PROVIDERS)}; got {name!r}")
        provider = PROVIDERS[name]
        reason = provider.why_not()
        if not reason and device not in provider.devices:
            reason = f"does not run on {device}"
        if reason:
            refused[name] = reason
        else:
            chosen.append(provider)
    return chosen, refused
