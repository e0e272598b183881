"""Draws the results of `run` and `recall` into picture files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flash_kda.cli.accuracy import ORDINARY_BOUND, Accuracy
from flash_kda.cli.console import UserError, check_parent, require

if TYPE_CHECKING:
    from flash_kda.cli.recall import Recall

_MAX_SEQUENCES = 12


def check_plot_path(path: Path | None) -> None:
    """Refuses a picture that cannot be written, before the work and not after it."""
    if path is None:
        return
    check_parent(path, "--plot")
    pyplot = _pyplot()
    known = pyplot.figure().canvas.get_supported_filetypes()
    pyplot.close("all")
    if path.suffix.lstrip(".").lower() not in known:
        raise UserError(
            f"--plot {path}: expected a name that ends in one of "
            f"{', '.join('.' + kind for kind in sorted(known))}"
        )


def _pyplot() -> Any:
    matplotlib = require("matplotlib", "--plot")
    matplotlib.use("Agg")
    return require("matplotlib.pyplot", "--plot")


def plot_run(path: Path, title: str, accuracy: Accuracy) -> None:
    """Error along the sequences above, norm of the state below; one colour a head."""
    pyplot = _pyplot()
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(10, 7), sharex=True)
    colours = pyplot.get_cmap("tab10")
    offset = 0
    for curve in accuracy.curves[:_MAX_SEQUENCES]:
        positions, few = curve.positions + offset, len(curve.positions) < 3
        for i, head in enumerate(accuracy.heads):
            label = f"head {head}" if curve is accuracy.curves[0] else None
            style = {"color": colours(i % 10), "lw": 1, "marker": "." if few else None}
            above.plot(positions, curve.error[i], label=label, **style)
            below.plot(positions, curve.state_norm[i], label=label, **style)
            if curve.run_state_norm is not None:
                below.plot(
                    positions, curve.run_state_norm[i], ".", color=colours(i % 10), ms=3, alpha=0.6
                )
        offset += curve.length
        for axis in (above, below):
            axis.axvline(offset, color="0.8", lw=0.8, zorder=0)
    above.axhline(ORDINARY_BOUND, color="0.4", ls="--", lw=1, label=f"bound {ORDINARY_BOUND:g}")
    above.set_yscale("log")
    above.set_ylabel("relative RMS error of out")
    above.set_title(f"{title}: against the fp64 recurrence")
    above.legend(fontsize=8, ncol=4)
    below.set_ylabel("Frobenius norm of the state")
    measured = any(curve.run_state_norm is not None for curve in accuracy.curves)
    below.set_title(
        "line: fp64 recurrence" + ("; dots: states that the run stored" if measured else ""),
        fontsize=9,
    )
    below.set_xlabel("token (grey lines: ends of sequences)")
    _save(figure, path)


def plot_recall(path: Path, recall: Recall) -> None:
    """Accuracy along the text: solid the memory, dashed the counts, one colour an order."""
    pyplot = _pyplot()
    names = recall.names[:_MAX_SEQUENCES]
    figure, axes = pyplot.subplots(
        len(names), 1, figsize=(10, 2 + 3 * len(names)), squeeze=False, layout="constrained"
    )
    colours = pyplot.get_cmap("tab10")
    for n, name in enumerate(names):
        axis = axes[n, 0]
        hits, counts = recall.hits[n], recall.count_hits[n]
        window = max(256, hits.shape[1] // 20)
        for i, order in enumerate(recall.orders):
            x, y = _moving_average(hits[i], window)
            axis.plot(x, y, color=colours(i % 10), lw=1.4, label=f"order {order}")
            x, y = _moving_average(counts[i], window)
            axis.plot(x, y, color=colours(i % 10), lw=0.8, ls="--")
        axis.set_ylim(0, 1)
        axis.set_ylabel("right answers")
        axis.set_title(f"{name} (windows of {window} bytes)", fontsize=9)
    axes[0, 0].legend(fontsize=8, ncol=4, title="solid: memory; dashed: counts")
    axes[-1, 0].set_xlabel("byte")
    _save(figure, path)


def _moving_average(hits: Any, window: int) -> tuple[Any, Any]:
    if hits.size < window:
        return np.arange(hits.size), np.full(hits.size, hits.mean() if hits.size else 0.0)
    sums = np.cumsum(np.concatenate([[0], hits.astype(np.float64)]))
    return np.arange(window, hits.size + 1), (sums[window:] - sums[:-window]) / window


def _save(figure: Any, path: Path) -> None:
    try:
        if not figure.get_constrained_layout():
            figure.tight_layout()
        figure.savefig(path, dpi=120)
    finally:
        _pyplot().close(figure)
