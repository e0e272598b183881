"""The options of every command; what they do is in the module of the command's name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flash_kda.cli import check as check_command
from flash_kda.cli import info as info_command
from flash_kda.cli import recall as recall_command
from flash_kda.cli import run as run_command
from flash_kda.cli.backend import DeviceChoice
from flash_kda.cli.cases import CASES, DEFAULT_CASE, Case
from flash_kda.cli.console import UserError, guarded, stdout
from flash_kda.cli.problem import Beta, DType, Gate, Options, Recipe, StateDType, generate
from flash_kda.cli.text_memory import Memory

app = typer.Typer(
    help="Kimi Delta Attention, the forward pass: run it, check it, watch it remember.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DeviceOption = Annotated[
    DeviceChoice, typer.Option(help="Where to run; auto takes a GPU if one can be used.")
]
ThreadsOption = Annotated[
    int, typer.Option(min=0, max=4096, help="CPU threads, 0 = all usable cores.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON and nothing else.")
]
JsonFileOption = Annotated[
    Path | None, typer.Option("--json-file", help="Write the result as JSON to this file too.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")]


def _case(
    name: str | None,
    seq_lens: str | None,
    heads: int | None,
    value_heads: int | None,
    key_dim: int | None,
    value_dim: int | None,
) -> Case:
    """The named case with the sizes that the options replace."""
    base = run_command.find_case(name or DEFAULT_CASE)
    if seq_lens is None and heads is None and (value_heads, key_dim, value_dim) == (None,) * 3:
        return base
    lengths = run_command.parse_lengths(seq_lens) if seq_lens is not None else base.seq_lens
    if not lengths:
        raise UserError("--seq-lens: expected at least one length")
    key_heads = heads or base.heads
    return Case(
        name=(name or "own sizes") if seq_lens is None else "own sizes",
        seq_lens=lengths,
        heads=key_heads,
        value_heads=value_heads or key_heads,
        key_dim=key_dim or base.key_dim,
        value_dim=value_dim or base.value_dim,
    )


@app.command()
@guarded
def run(
    case: Annotated[
        str | None, typer.Argument(help=f"Published case: {', '.join(CASES)}. [{DEFAULT_CASE}]")
    ] = None,
    seq_lens: Annotated[
        str | None, typer.Option(help="Lengths of the sequences: 1300,547 or 8x1024.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="H, query/key heads.")] = None,
    value_heads: Annotated[
        int | None, typer.Option(min=1, help="HV, a multiple of H; as H if not given.")
    ] = None,
    key_dim: Annotated[int | None, typer.Option(min=1, help="K, up to 256.")] = None,
    value_dim: Annotated[int | None, typer.Option(min=1, help="V, up to 256.")] = None,
    dtype: Annotated[DType, typer.Option(help="q, k, v and out.")] = DType.bf16,
    gate_dtype: Annotated[
        DType | None, typer.Option(help="g and beta; as --dtype if not given.")
    ] = None,
    state_dtype: Annotated[StateDType, typer.Option(help="The states.")] = StateDType.fp32,
    initial_state: Annotated[
        bool, typer.Option(help="Start from random states, not from zero.")
    ] = False,
    gate: Annotated[Gate, typer.Option(help="How g becomes the log decay.")] = Gate.lower_bound,
    lower_bound: Annotated[float, typer.Option(help="Of the gate, in [-5, 0].")] = -5.0,
    beta: Annotated[Beta, typer.Option(help="How beta becomes the write strength.")] = Beta.logit,
    l2norm: Annotated[bool, typer.Option(help="Normalise q and k in the call.")] = True,
    scale: Annotated[float | None, typer.Option(help="Of the output; K ** -0.5.")] = None,
    sequence_split: Annotated[
        bool, typer.Option(help="On a GPU: cut long sequences of few heads into segments.")
    ] = True,
    seed: SeedOption = 0,
    input_: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="Own tensors, .npz or .safetensors: q, k, v, g, beta, and where wanted A_log, "
            "dt_bias, initial_state, cu_seqlens.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write o and final_state here, .npz or .safetensors.")
    ] = None,
    device: DeviceOption = DeviceChoice.auto,
    threads: ThreadsOption = 0,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed calls; the median counts. [5; 50 on a GPU]")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Calls before these. [1; 10 on a GPU]")
    ] = None,
    check_heads: Annotated[
        int, typer.Option(min=0, help="Heads to compare with the fp64 recurrence.")
    ] = 3,
    plot: Annotated[
        Path | None, typer.Option(help="Draw error and state norm along the sequences.")
    ] = None,
    explain: Annotated[bool, typer.Option(help="Print the plan of the call.")] = False,
    json: JsonOption = False,
    json_file: JsonFileOption = None,
) -> None:
    """Run the operator: a published case, sizes of your own, or your own tensors.

    Exit status 1: the error of a generated case is above the promised bound. 2: it did not run.
    """
    options = Options(gate, lower_bound, beta, l2norm, scale, sequence_split)
    how = run_command.Measurement(device, threads, repeats, warmup, check_heads, seed)
    outputs = run_command.Outputs(output, plot, json_file, json, explain)
    if input_ is not None:
        sizes = (case, seq_lens, heads, value_heads, key_dim, value_dim)
        if any(size is not None for size in sizes):
            raise UserError("--input: takes its sizes from the file; give no case and no sizes")
        path = input_
        raise typer.Exit(
            run_command.run(
                lambda _: run_command.load_problem(path, options, state_dtype), how, outputs
            )
        )
    chosen = _case(case, seq_lens, heads, value_heads, key_dim, value_dim)
    recipe = Recipe(dtype, gate_dtype, state_dtype, initial_state, seed)
    raise typer.Exit(
        run_command.run(lambda stages: generate(chosen, options, recipe, stages), how, outputs)
    )


@app.command()
@guarded
def recall(
    files: Annotated[list[Path], typer.Argument(help="Texts; each is a sequence of the batch.")],
    orders: Annotated[str, typer.Option(help="Bytes of context of each head.")] = "1,2,3,4,6,8",
    write: Annotated[
        float, typer.Option(help="Share of the error that a token writes, in (0, 1].")
    ] = 0.1,
    half_life: Annotated[
        float, typer.Option(help="Tokens until a stored value has halved; inf = no forgetting.")
    ] = float("inf"),
    key_dim: Annotated[
        int, typer.Option(min=16, max=256, help="K, the size of a context's code.")
    ] = 128,
    split: Annotated[
        bool, typer.Option(help="Read again in two calls and compare the answers.")
    ] = True,
    split_at: Annotated[
        int | None, typer.Option(min=1, help="Cut at this byte, not in the middle.")
    ] = None,
    check_heads: Annotated[
        int, typer.Option(min=0, help="Heads to compare with the fp64 recurrence.")
    ] = 0,
    show: Annotated[
        int, typer.Option(min=0, help="Print the last bytes with the right answers in green.")
    ] = 0,
    device: DeviceOption = DeviceChoice.auto,
    threads: ThreadsOption = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy along the text.")] = None,
    json: JsonOption = False,
    json_file: JsonFileOption = None,
) -> None:
    """Let the operator read text and name each next byte from memory before it sees it.

    Exit status 1: reading in two calls gave other answers. 2: it did not run.
    """
    if not 0 < write <= 1:
        raise UserError(f"--write {write:g}: expected a value above 0 and at most 1")
    if not half_life >= 1:
        raise UserError(f"--half-life {half_life:g}: expected at least 1 token")
    settings = recall_command.Settings(
        orders=recall_command.parse_orders(orders),
        memory=Memory(write, half_life, key_dim),
        device=device,
        threads=threads,
        split=split or split_at is not None,
        split_at=split_at,
        check_heads=check_heads,
        show=show,
        plot=plot,
        json_file=json_file,
        json=json,
    )
    raise typer.Exit(recall_command.recall(files, settings))


@app.command()
@guarded
def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Inputs to check, such as T1 T14; all if none.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Only the short ones.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the inputs and stop.")] = False,
    device: DeviceOption = DeviceChoice.auto,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="A line for every comparison, not for every input.")
    ] = False,
    json: JsonOption = False,
    json_file: JsonFileOption = None,
) -> None:
    """Check the accuracy of this build on inputs that have broken kernels like these.

    Exit status 1: some figure is outside its bound. 2: it did not run.
    """
    if list_:
        stdout().print(check_command.listing())
        return
    settings = check_command.Settings(tuple(names or ()), quick, device, verbose, json_file, json)
    raise typer.Exit(check_command.check(settings))


@app.command()
@guarded
def info(json: JsonOption = False) -> None:
    """Show the version, the backends and why one is unavailable, the machine and the libraries."""
    raise typer.Exit(info_command.info(json))
