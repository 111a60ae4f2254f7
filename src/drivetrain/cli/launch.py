"""The verb launch: a command, a batch script or manifests that start a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from drivetrain.cli.arguments import NodesOption, Overrides, RunFile, TrustOption, as_typed, run_file_here, was_given
from drivetrain.cli.console import errors, print_notices

OF_NODES = ("cpus", "memory")
OF_KUBERNETES = ("image", "volume", "work_folder", "queue", "restarts", "namespace", *OF_NODES)
READ = {  # options that have an effect, by the way of starting
    "local": (),
    "torchrun": (),
    "ray": (),
    "slurm": ("time", "partition", "account", "image", "mount", *OF_NODES),
    "kubernetes": OF_KUBERNETES,
    "jobset": OF_KUBERNETES,
    "skypilot": ("image", "volume", "accelerator", "restarts", *OF_NODES),
}
OF_CLUSTERS = {name for names in READ.values() for name in names}
OF_RUNS = {"overrides", "nodes", "machine", "trust"}  # a manifest that is validated has none


def launch(
    context: typer.Context,
    run_file: RunFile,
    overrides: Overrides = None,
    local: Annotated[bool, typer.Option("--local", help="Print the command that starts it on this machine.")] = False,
    torchrun: Annotated[bool, typer.Option("--torchrun", help="Print the command for torchrun.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Print the command for a machine of a Ray cluster.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a batch script for Slurm.")] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Print manifests: Kubeflow Trainer's TrainJob and its runtime.")
    ] = False,
    jobset: Annotated[bool, typer.Option("--jobset", help="Print manifests: a JobSet, without Kubeflow.")] = False,
    skypilot: Annotated[bool, typer.Option("--skypilot", help="Print a task for `sky jobs launch`.")] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="RUN_FILE is a manifest: find what a cluster would drop or refuse.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="First do what `check` does, and refuse a run that would not fit.")
    ] = False,
    nodes: NodesOption = None,
    time: Annotated[str, typer.Option(help="Slurm: time limit of the job: 12h, 1d12h, HH:MM:SS.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    mount: Annotated[list[str] | None, typer.Option(help="Slurm: SRC:DST in the container of --image.")] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", "-m", help="The cluster's machines, as 8xH100-80GB, for the plan.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores a node.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a node, as 200Gi.")] = None,
    image: Annotated[str | None, typer.Option(help="The container's image, with drivetrain in it.")] = None,
    volume: Annotated[
        list[str] | None, typer.Option(help="Kubernetes, SkyPilot: CLAIM:/place; may be repeated.")
    ] = None,
    work_folder: Annotated[str | None, typer.Option(help="Kubernetes: where paths begin; the first volume.")] = None,
    queue: Annotated[str | None, typer.Option(help="Kubernetes: the queue of Kueue.")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Kubernetes, SkyPilot: restarts, beside those of preemptions.")
    ] = 10,
    accelerator: Annotated[str | None, typer.Option(help="SkyPilot: a GPU by its name there, as H100.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes: the namespace.")] = None,
    trust: TrustOption = False,
) -> None:
    """Print what starts a run, here or elsewhere. `processes` counts ONE machine's GPUs: 8 on 2 nodes are 16."""
    if sum((local, torchrun, ray, slurm, kubernetes, jobset, skypilot, validate)) != 1:
        raise typer.BadParameter(
            "choose one of --local, --torchrun, --ray, --slurm, --kubernetes, --jobset, --skypilot, --validate"
        )
    _refuse_unread(context)
    if validate:
        if check:
            raise typer.BadParameter("--check is of a run file, and --validate of a manifest")
        _validate(run_file)
        return
    from drivetrain.launch import commands
    from drivetrain.launch.cluster import checked_for_cluster
    from drivetrain.launch.cluster_plan import plan_verdict

    typed, run_file = run_file, run_file_here(run_file)
    job = checked_for_cluster(run_file, overrides or [], nodes, _where(local, kubernetes or jobset), trust)
    notices = [*job.notices]
    if local or torchrun or ray:
        write = commands.local_command if local else commands.ray_command if ray else commands.torchrun_command
        text = write(run_file, job.overrides, job.run)
    elif slurm:
        from drivetrain.launch.slurm import Allocation, sbatch_script

        allocation = Allocation(time, partition, account, cpus, memory, image, mount or [])
        text = sbatch_script(run_file, job.overrides, job.run, allocation)
        notices += allocation.notices(job.run)
    elif skypilot:
        from drivetrain.launch.kubernetes import as_yaml
        from drivetrain.launch.skypilot import Wanted, skypilot_task

        wanted = Wanted(image, accelerator, volume or [], cpus, memory, restarts)
        text = as_yaml([skypilot_task(run_file, job.overrides, job.run, wanted)])
        notices += wanted.notices
    else:
        from drivetrain.launch import kubernetes as manifests

        asked = manifests.request(image, volume or [], work_folder, queue, cpus, memory, restarts, namespace)
        made = manifests.jobset if jobset else manifests.trainjob
        text = manifests.as_yaml(made(run_file, job.overrides, job.run, asked))
    on_cluster = machine is not None or not (local or torchrun)
    if not check:
        print_notices([*notices, *([plan_verdict(job.run, machine).sentence] if on_cluster else [])])
    elif on_cluster:
        from drivetrain.launch.launch_check import check_for_cluster

        shares_folder = not (kubernetes or jobset or skypilot)
        print_notices([*notices, *check_for_cluster(run_file, job, machine, shares_folder)])
    else:
        from drivetrain.launch.launch_check import check_here

        print_notices(check_here(run_file, overrides or [], nodes, trust))
    typer.echo(text.replace(str(run_file), as_typed(typed)), nl=False)


def _validate(manifest: Path) -> None:
    from drivetrain.config.packages import require

    require("launch --validate", ["kubeflow_trainer_api"])
    from drivetrain.launch.manifest_check import check_manifests

    errors.print(f"{check_manifests(manifest)} objects: no mistake was found")


def _where(local: bool, in_pods: bool) -> Literal["here", "shared", "elsewhere"]:
    return "here" if local else "elsewhere" if in_pods else "shared"


def _refuse_unread(context: typer.Context) -> None:
    """Raises UserError for options that the chosen way does not read, since one is given for an effect."""
    from drivetrain.errors import Problem, UserError

    way = next(name for name in (*READ, "validate") if context.params[name])
    unread = OF_CLUSTERS | OF_RUNS if way == "validate" else OF_CLUSTERS.difference(READ[way])
    given = [
        "KEY=VALUE" if each.name == "overrides" else each.opts[0]
        for each in context.command.params
        if each.name in unread and was_given(context, each.name)
    ]
    if given:
        raise UserError([Problem(name, f"has no effect with --{way}", "leave it out") for name in given])
