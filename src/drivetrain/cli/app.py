"""The command line: one short function a verb. torch is imported inside the verbs, so that --help is instant."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from drivetrain import __version__
from drivetrain.cli.arguments import example, path_argument, path_option
from drivetrain.cli.cache import cache
from drivetrain.cli.checkpoint import checkpoint
from drivetrain.cli.doctor import doctor
from drivetrain.cli.export import export
from drivetrain.cli.fields import fields, schema
from drivetrain.cli.import_verb import import_
from drivetrain.cli.init_verb import init, recipes
from drivetrain.cli.replay import replay
from drivetrain.runtime.strict_json import dumps

if TYPE_CHECKING:
    from drivetrain.launch.job import Node, Result
    from drivetrain.launch.prepare import Checked

CODES = "Exit codes: 0 done, 1 failed while running, 2 refused before any work, 130 / 143 saved after Ctrl-C / SIGTERM."

app = typer.Typer(
    help=f"Train a PyTorch model under any precision and engine from one run file.\n\n{CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    epilog=example(
        "drivetrain train run.yaml", "drivetrain train run.yaml --resume", "drivetrain predict run.yaml -o rows.csv"
    ),
)
errors = Console(stderr=True, highlight=False)
output = Console(highlight=False)


class Verb(StrEnum):
    train = "train"
    predict = "predict"


RunFile = Annotated[Path, path_argument(metavar="RUN.YAML", help="Run file.", show_default=False)]
RunPlace = Annotated[Path, path_argument(metavar="RUN", help="Run file, or the folder of a run.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, e.g. precision=bf16-mixed lr=3e-4.")
]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="best, last, or a checkpoint folder.")]
TrustOption = Annotated[bool, typer.Option("--trust", help="Run Python that the run.yaml of a run's folder names.")]
NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help="Machines, each of which starts this command, and `processes` ranks."),
]
NodeRankOption = Annotated[int, typer.Option("--node-rank", min=0, help="Which of them this one is, from 0.")]
RendezvousOption = Annotated[str | None, typer.Option("--rendezvous", help="HOST:PORT of the first of them.")]


@app.command(
    epilog=example(
        "drivetrain train run.yaml",
        "drivetrain train run.yaml engine=ddp processes=4 precision=bf16-mixed",
        "drivetrain train run.yaml --resume",
    )
)
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest good checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and the result.")] = False,
    nodes: NodesOption = None,
    node_rank: NodeRankOption = 0,
    rendezvous: RendezvousOption = None,
    trust: TrustOption = False,
) -> None:
    """Train. `drivetrain fields` lists every key of a run file."""
    if resume and overwrite:
        raise typer.BadParameter("--resume keeps the run, --overwrite replaces it: give one of them")
    from drivetrain.launch.job import Node
    from drivetrain.launch.prepare import checked

    node = Node(node_rank, rendezvous)
    ready = checked(run_file, overrides or [], nodes, node, trust=trust)
    if ready.is_first and ready.run.nodes == 1 and not (resume or overwrite):  # refused before any rank is started
        from drivetrain.runtime.run_folder import RunFolder

        RunFolder(ready.run.folder).refuse_if_busy()
    if ready.is_first and errors.is_terminal and not quiet:  # importing PyTorch takes seconds, in which nothing is seen
        errors.print(f"[dim]starting {escape(ready.run.name)}: loading PyTorch, then the data[/]", soft_wrap=True)
    result = _start(ready, node, verb="train", resume=resume, overwrite=overwrite, quiet=quiet)
    if result.of_first:
        from drivetrain.cli.next_commands import next_commands
        from drivetrain.cli.run_table import report_table
        from drivetrain.training.report import RunReport

        found = RunReport.model_validate(result.value)
        output.print(report_table(found))
        following = next_commands(run_file, overrides or [], ready.run, found.status, bool(found.metrics))
        for purpose, command in [] if quiet else following:
            output.print(f"[dim]{purpose}:[/] {escape(command)}", soft_wrap=True)
    raise typer.Exit(result.code)


@app.command(epilog=example("drivetrain evaluate run.yaml --checkpoint last", "drivetrain evaluate runs/digits"))
def evaluate(
    run_file: RunPlace,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = "best",
    trust: TrustOption = False,
) -> None:
    """Evaluate a checkpoint of a run; prints JSON."""
    from drivetrain.launch.prepare import checked_place

    ready = checked_place(run_file, overrides or [], checkpoint=checkpoint, trust=trust)
    result = _start(ready, verb="evaluate", checkpoint=checkpoint)
    if result.of_first:
        typer.echo(dumps(result.value, indent=2))


@app.command(
    epilog=example("drivetrain predict run.yaml -o predictions.csv", 'drivetrain predict run.yaml --text "Good."')
)
def predict(
    run_file: RunPlace,
    overrides: Overrides = None,
    checkpoint: CheckpointOption = "best",
    data: Annotated[
        str | None, typer.Option(help="Data to predict for: a file or folder; - reads texts from stdin, one a line.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text to predict for; may be given several times.")] = None,
    to: Annotated[Path | None, path_option("--output", "-o", help="File .jsonl or .csv; left out, the screen.")] = None,
    trust: TrustOption = False,
) -> None:
    """Predict with a checkpoint, one row a sample, in order: for the evaluation data, or for data that you name."""
    from drivetrain.inference.request import asked_for
    from drivetrain.launch.prepare import checked_place

    data, texts = asked_for(data, text or [])
    ready = checked_place(run_file, overrides or [], checkpoint=checkpoint, data=data, output=to, trust=trust)
    result = _start(ready, verb="predict", checkpoint=checkpoint, data=data, texts=texts, output=to)
    if result.of_first and to is not None:
        errors.print(f"{result.value:,} prediction{'s' * (result.value != 1)} in {escape(str(to))}", soft_wrap=True)


@app.command(epilog=example("drivetrain compare run.yaml precision=fp32,bf16-mixed engine=single,ddp --seeds 3"))
def compare(
    run_file: RunFile,
    axes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE,VALUE", help="Axes, e.g. precision=fp32,bf16-mixed; one value overrides."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell, at seed, seed + 1, ...")] = 1,
    verb: Annotated[Verb, typer.Option(help="The work of each cell.")] = Verb.train,
    to: Annotated[Path | None, path_option("--output", "-o", help="Folder; left out, runs/<file>-compare.")] = None,
    cell_timeout: Annotated[float | None, typer.Option(min=0, help="Seconds a cell may take.")] = None,
    cell_memory: Annotated[float | None, typer.Option(min=0, help="MiB of resident memory a cell may take.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="To predict with: a folder; left out, fresh weights.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run all cells again.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run cells again that did not complete.")] = False,
    trust: TrustOption = False,
) -> None:
    """Train (or predict) along any axes and put the results side by side."""
    from drivetrain.compare import verbs
    from drivetrain.compare.matrix import Job
    from drivetrain.compare.runner import Again, Limits
    from drivetrain.compare.table import comparison_table

    again = Again.ALL if fresh else Again.FAILED if retry else Again.UNFINISHED
    job = Job(verb.value, checkpoint)
    limits = Limits(cell_timeout, None if cell_memory is None else int(cell_memory * 2**20))
    try:
        comparison, where = verbs.compare(run_file, axes or [], to, seeds, job, limits, again, trust)
    except KeyboardInterrupt:
        errors.print("[bold red]Interrupted.[/] Finished cells are kept: the same command goes on with the others.")
        raise typer.Exit(130) from None
    console = _wide(output)
    console.print(comparison_table(comparison, console))
    errors.print(escape(where), soft_wrap=True)
    raise typer.Exit(0 if all(row.status in {"completed", "refused"} for row in comparison.rows) else 1)


@app.command(epilog=example("drivetrain report runs/one runs/two --output page"))
def report(
    folders: Annotated[list[Path], path_argument(metavar="FOLDER", help="Folders of runs and of comparisons.")],
    to: Annotated[Path | None, path_option("--output", "-o", help="Folder for page, tables and plots.")] = None,
) -> None:
    """Put runs and comparisons of different times side by side."""
    from drivetrain.compare import verbs
    from drivetrain.compare.table import comparison_table

    comparison = verbs.report(folders)
    console = _wide(output)
    console.print(comparison_table(comparison, console))
    if to is not None:
        verbs.write_report(comparison, to)
        errors.print(f"page, tables and plots in {escape(str(to))}", soft_wrap=True)


@app.command(epilog=example("drivetrain data run.yaml data.max_length=256"))
def data(
    run_file: RunFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all bytes with what runs read before.")] = False,
    trust: TrustOption = False,
) -> None:
    """Show what is in the data: rows, what becomes of them, lengths, padding, a sample with its trained tokens
    marked."""
    from drivetrain.cli.data import examine, show, show_verified
    from drivetrain.launch.prepare import checked

    ready = checked(run_file, overrides or [], trust=trust, model_files=False)  # the report says what train refuses
    if not ready.is_first:
        return
    if verify:
        raise typer.Exit(show_verified(ready.run, output, as_json))
    report, warnings = examine(ready.run)
    _say(warnings)
    show(report, _wide(output), as_json)


@app.command(epilog=example("drivetrain prove run.yaml engine=fsdp processes=2"))
def prove(
    run_file: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to compare.")] = 10,
    trust: TrustOption = False,
) -> None:
    """Compare a few steps of your own run on its engine with one process: PASS or FAIL a promise. Nothing is kept."""
    from drivetrain.cli import prove_run
    from drivetrain.cli.run_table import verdicts_table
    from drivetrain.launch.prepare import checked

    ready = checked(run_file, overrides or [], trust=trust)
    _say(ready.notices)
    proof = prove_run.prove(ready.run, steps, lambda line: errors.print(f"[dim]{escape(line)}[/]"))
    output.print(verdicts_table([(each.promise, each.holds, each.why) for each in proof.verdicts]))
    _say(proof.remarks)
    raise typer.Exit(0 if proof.holds else 1)


@app.command(epilog=example("drivetrain launch --slurm run.yaml engine=fsdp processes=8 --nodes 2 > job.sbatch"))
def launch(
    run_file: RunFile,
    overrides: Overrides = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a batch script for Slurm.")] = False,
    nodes: NodesOption = None,
    time: Annotated[str, typer.Option(help="Time limit of the job, HH:MM:SS.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores a node.")] = None,
) -> None:
    """Write a run's batch script for Slurm. `processes` counts ONE machine's GPUs: processes=8 --nodes 2 takes 16."""
    from drivetrain.launch.cluster import checked_for_cluster
    from drivetrain.launch.slurm import Allocation, sbatch_script

    if not slurm:
        raise typer.BadParameter("choose a cluster: --slurm")
    job = checked_for_cluster(run_file, overrides or [], nodes)
    _say(job.notices)
    typer.echo(sbatch_script(run_file, job.overrides, job.run, Allocation(time, partition, account, cpus)), nl=False)


@app.command(epilog=example("drivetrain version"))
def version() -> None:
    """Print the version of drivetrain."""
    typer.echo(__version__)


app.command(epilog=example("drivetrain export runs/mine --to transformers --dtype bf16 --output mine"))(export)
app.command(epilog=example("drivetrain schema > run.schema.json"))(schema)
app.command("import", epilog=example("drivetrain import qwen_lora_sft.yaml --output run.yaml"))(import_)
app.command(epilog=example("drivetrain replay runs/digits --step 40"))(replay)
app.command(epilog=example("drivetrain fields", "drivetrain fields optimizer schedule"))(fields)
app.command(epilog=example("drivetrain init", "drivetrain init --data hotels.csv", "drivetrain init linear"))(init)
app.command(epilog=example("drivetrain recipes"))(recipes)
app.command(epilog=example("drivetrain doctor", "drivetrain doctor runs/digits --bundle"))(doctor)
app.command(epilog=example("drivetrain cache", "drivetrain cache --unused-days 30 --most-gb 50"))(cache)
app.add_typer(checkpoint, name="checkpoint")


def _start(checked: Checked, node: Node | None = None, **job: Any) -> Result:
    from drivetrain.launch.job import Job, Node
    from drivetrain.launch.start import start_at_terminal

    if job["verb"] != "train" and checked.is_first:
        _say(checked.notices)  # a training tells them itself, and keeps them
    return start_at_terminal(Job(run=checked.run, notices=checked.notices, **job), node or Node())


def _wide(console: Console) -> Console:
    return console if console.is_terminal else Console(highlight=False, width=200)


def _say(notices: list[str]) -> None:
    for notice in notices:
        errors.print(f"[yellow]note[/] {escape(notice)}")
