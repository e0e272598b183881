"""Puts the figures of a result file into docs/performance.md and draws them.

    python -m benchmarks.gpu.render [benchmarks/results/h200.json]

Tables go between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; all else on the page stays.
Plots go to benchmarks/plots/.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import cases
from benchmarks.gpu.environment import ROOT, kernel_digest

DEFAULT = ROOT / "benchmarks/results/h200.json"
PAGE = ROOT / "docs/performance.md"
PLOTS = ROOT / "benchmarks/plots"
HEADLINE_METHOD = "graph"

# What people read for the names in the file.
PROVIDER_NAMES = {"flash_kda": "flash_kda", "fla_triton": "flash-linear-attention (Triton)"}

Record = dict[str, Any]
Row = dict[str, Any]
Series = dict[str, list[float]]  # a value for each group, by label


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is text, the others are figures."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _providers(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(row["provider"] for row in rows))
    return sorted(names, key=lambda name: name != "flash_kda")


def _label(provider: str) -> str:
    return PROVIDER_NAMES.get(provider, provider)


def _spread(row: Row) -> str:
    if row["p20_ms"] is None or row["p80_ms"] is None:
        return "not kept"
    return f"{row['p20_ms']:.3f} to {row['p80_ms']:.3f}"


def _cases(record: Record, method: str) -> dict[str, dict[str, Row]]:
    """Rows of one method by case and provider, in the order of the case list."""
    found: dict[str, dict[str, Row]] = {}
    for row in record["results"]:
        if row["method"] == method:
            found.setdefault(row["case"], {})[row["provider"]] = row
    ordered = [name for name in cases.CASES if name in found]
    return {name: found[name] for name in [*ordered, *(set(found) - set(ordered))]}


def speed_table(record: Record) -> str:
    """Medians of the headline method, how they spread, and the bandwidth of the least traffic."""
    names = _providers(record["results"])
    others = [name for name in names if name != "flash_kda"]
    header = ["case", "flash_kda ms", "p20 to p80", "TB/s"]
    for name in others:
        header += [f"{_label(name)} ms", "times faster"]
    rows = []
    for case, of_case in _cases(record, HEADLINE_METHOD).items():
        own = of_case.get("flash_kda")
        line = [f"`{case}`", "-", "-", "-"]
        if own:
            bandwidth = cases.CASES[case].least_bytes / own["median_ms"] * 1e-9
            spread = _spread(own)
            line[1:] = [f"{own['median_ms']:.3f}", spread, f"{bandwidth:.2f}"]
        for name in others:
            row = of_case.get(name)
            ratio = f"{row['median_ms'] / own['median_ms']:.1f}" if row and own else "-"
            line += [f"{row['median_ms']:.3f}" if row else "-", ratio]
        rows.append(line)
    return markdown_table(header, rows) + _other_states(record)


def _other_states(record: Record) -> str:
    """Where a provider has no fp32 states in and out."""
    others: dict[str, list[str]] = {}
    for row in record["results"]:
        if row["method"] == HEADLINE_METHOD and row["state"] != "fp32":
            text = f"{_label(row['provider'])} {row['state']}"
            others.setdefault(row["case"], []).append(text)
    lines = [f"States of `{case}`: {', '.join(texts)}." for case, texts in others.items()]
    return "\n\n" + " ".join(lines) if lines else ""


def methods_table(record: Record) -> str:
    """The other methods beside the headline, for every provider."""
    methods = list(dict.fromkeys(row["method"] for row in record["results"]))
    names = _providers(record["results"])
    columns = [(name, method) for name in names for method in methods]
    by_method = {method: _cases(record, method) for method in methods}
    rows = []
    for case in by_method[methods[0]] if methods else ():
        found = [by_method[method].get(case, {}).get(name) for name, method in columns]
        cells = [f"{row['median_ms']:.3f}" if row else "-" for row in found]
        rows.append([f"`{case}`", *cells])
    return markdown_table(["case", *[f"{_label(n)}, {m} ms" for n, m in columns]], rows)


def accuracy_table(record: Record) -> str:
    """Worst head's relative RMS error, out and state, for every provider."""
    names = _providers(record["accuracy"])
    found = {(row["input"], row["provider"]): row for row in record["accuracy"]}
    rows = []
    for name in dict.fromkeys(row["input"] for row in record["accuracy"]):
        line = [name]
        for provider in names:
            row = found.get((name, provider))
            line += [f"{row['out']:.1e}", f"{row['state']:.1e}"] if row else ["-", "-"]
        rows.append(line)
    header = ["input"]
    for provider in names:
        header += [f"{_label(provider)}, out", "state"]
    return markdown_table(header, rows)


def host_table(record: Record) -> str:
    """Microseconds of the caller's thread."""
    rows = [[row["call"], f"{row['us']:.1f}"] for row in record.get("host", [])]
    return markdown_table(["call", "us"], rows) if rows else "Not measured with these kernels."


def sweep_text(record: Record) -> str:
    """How the plan's choices compare with the best ones, and the shapes where they do worst."""
    found = record.get("sweep_summary")
    if not found or not found["shapes"]:
        return "Not measured with these kernels."
    rows = [
        [str(r["tokens"]), str(r["heads"]), str(r["sequences"]), f"{r['ratio']:.2f}", r["best"]]
        for r in found["worst"]
        if r["ratio"] > 1
    ]
    text = (
        f"{found['shapes']} shapes; the plan's own choice takes at most {found['worst_ratio']:.2f}"
        f" times the best one's time, and more than 1.1 times in {found['above_1.1']}."
    )
    table = markdown_table(["T", "H", "N", "times the best", "the best"], rows)
    return f"{text}\n\n{table}" if rows else text


def skipped_text(record: Record) -> str:
    """What was left out, and why."""
    rows = record.get("skipped", [])
    lines = [
        f"- {row['case']}, {_label(row['provider'] or 'all')}, {row['step']}: {row['reason']}"
        for row in rows
    ]
    return "\n".join(lines) or "Nothing was left out."


def source_line(record: Record) -> str:
    """Where the figures come from, and whether the kernels have changed since."""
    same = record["kernel_digest"] == kernel_digest()
    text = (
        f"{record['gpu']}, driver {record['driver']}, CUDA {record['cuda']}, torch"
        f" {record['torch']}, commit `{record['commit'][:12]}`, kernels"
        f" `{record['kernel_digest'][:12]}`{'' if same else ' (changed since)'}."
    )
    return f"{text}\n\n{record['note']}" if record.get("note") else text


def sections(record: Record) -> dict[str, str]:
    """Text for each pair of marks."""
    return {
        "source": source_line(record),
        "speed": speed_table(record),
        "methods": methods_table(record),
        "accuracy": accuracy_table(record),
        "host": host_table(record),
        "sweep": sweep_text(record),
        "skipped": skipped_text(record),
    }


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with the text between its marks replaced.

    Raises:
        ValueError: The page lacks a pair of marks.
    """
    for name, text in parts.items():
        pattern = f"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)"
        marks = re.search(pattern, page, re.DOTALL)
        if marks is None:
            raise ValueError(f"page: expected marks bench:{name} and /bench:{name}")
        page = f"{page[: marks.end(1)]}{text}\n{page[marks.start(2) :]}"
    return page


def draw(record: Record, folder: Path) -> list[Path]:
    """Bars of time and of error; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"\W+", "-", record["gpu"].lower().replace("nvidia", "")).strip("-")
    of_cases = _cases(record, HEADLINE_METHOD)
    names = _providers(record["results"])
    inputs = list(dict.fromkeys(row["input"] for row in record["accuracy"]))
    found = {(row["input"], row["provider"]): row["out"] for row in record["accuracy"]}
    errors = {
        _label(n): [found.get((i, n), 0.0) for i in inputs] for n in _providers(record["accuracy"])
    }
    headline = [case.name for case in cases.GROUPS["headline"]]
    first = [case for case in of_cases if case in headline]
    more = [case for case in of_cases if case not in headline]

    def times(shown: Sequence[str]) -> Series:
        return {
            _label(n): [of_cases[c].get(n, {}).get("median_ms", 0.0) for c in shown] for n in names
        }

    replay = "ms, CUDA-graph replay, L2 flushed"
    written = []
    for name, groups, series, unit in (
        ("speed", first, times(first), replay),
        ("speed_more", more, times(more), replay),
        ("accuracy", inputs, errors, "relative RMS error of out, worst head"),
    ):
        if not groups:
            continue
        figure, axes = pyplot.subplots(figsize=(1.6 + 1.3 * len(groups), 3.6))
        width = 0.8 / max(len(series), 1)
        for i, (label, values) in enumerate(series.items()):
            at = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
            bars = axes.bar(at, values, width, label=label)
            axes.bar_label(bars, [f"{v:.3g}" if v else "" for v in values], fontsize=7)
        axes.margins(y=0.1)
        if name == "speed_more":  # from 0.01 to some ms
            axes.set_yscale("log")
        axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right", fontsize=8)
        axes.set_ylabel(unit, fontsize=8)
        axes.set_title(f"{record['gpu']}, commit {record['commit'][:12]}", fontsize=9, pad=22)
        axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        figure.tight_layout()
        path = folder / f"{stem}_{name}.png"
        figure.savefig(path, dpi=130, metadata={"Software": None})
        pyplot.close(figure)
        written.append(path)
    return written


def main(arguments: list[str] | None = None) -> int:
    """Renders; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--plots", type=Path, default=PLOTS)
    args = parser.parse_args(arguments)
    try:
        record = json.loads(args.file.read_text())
        args.page.write_text(fill(args.page.read_text(), sections(record)))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in [args.page, *draw(record, args.plots)]:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
