"""`fedbe flower`: an app, keys, a deployment on this machine, a run. Commands import Flower when they need it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbe.cli.console import out

if TYPE_CHECKING:
    from fedbe.flower.deployment import Deployment

app = typer.Typer(help="Federations with Flower: a new app, keys, a deployment, a run.", no_args_is_help=True)

Dir = Annotated[Path, typer.Argument(help="The folder of the app.", metavar="DIR")]
Nodes = Annotated[int, typer.Option(min=1, help="The number of nodes (clients) in the federation.")]


@app.command()
def new(folder: Dir) -> None:
    """Write a complete Flower app that learns handwritten digits, as a starting point."""
    from fedbe.flower import template

    template.write(folder)
    out.print(f"a Flower app is in {folder}; read {folder / 'README.md'}")


@app.command()
def certs(
    folder: Dir,
    nodes: Nodes = 3,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of the server for nodes on other machines.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are valid.")] = 365,
) -> None:
    """Make a certificate authority, the server's certificate and a key for each node."""
    from fedbe.flower import certs as keys

    path = keys.make(folder, nodes, host or (), days)
    out.print(f"keys and certificates are in {path}; keep ca.key on another machine")


@app.command()
def up(folder: Dir, nodes: Nodes = 3) -> None:
    """Start a SuperLink with TLS and node authentication, and SuperNodes, on 127.0.0.1."""
    from fedbe.flower.deployment import Deployment

    Deployment(folder).up(nodes, lambda line: out.print(line))
    out.print(f"logs: {folder / 'state'}; train with: fedbe flower run {folder}; stop with: fedbe flower down {folder}")


@app.command()
def run(
    folder: Dir,
    name: Annotated[str | None, typer.Option(help="Name of the run; a stopped run continues.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the app, e.g. rounds=5.")
    ] = None,
) -> None:
    """Train the app on the deployment and follow the run."""
    from fedbe.flower import submission
    from fedbe.flower.deployment import Deployment

    deployment = Deployment(folder)
    run_id, results = submission.submit(deployment, name, changes or (), lambda line: out.print(line))
    out.print(f"run {run_id} is submitted; results: {results}")
    try:
        outcome = submission.follow(
            deployment,
            run_id,
            results,
            lambda record: out.print(round_sentence(record)),
            lambda online, needed: out.print(nodes_sentence(deployment, results.name, online, needed)),
        )
    except KeyboardInterrupt:
        home = deployment.state / "flwr"
        out.print(f"\nno longer following; the run continues. Stop it with: FLWR_HOME={home} flwr stop {run_id} fedbe")
        raise typer.Exit(130) from None
    accuracy = outcome.report.get("server", {}).get(str(outcome.rounds), {}).get("accuracy")
    measured = f", accuracy {100 * accuracy:.1f} %" if accuracy is not None else ""
    out.print(f"done after round {outcome.rounds}{measured}. Model: {results / 'model.safetensors'}")


@app.command()
def down(folder: Dir) -> None:
    """Stop the processes that `up` started; runs, keys and the database stay."""
    from fedbe.flower.deployment import Deployment

    stopped = Deployment(folder).down()
    out.print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


def round_sentence(record: dict[str, Any]) -> str:
    """One line about a finished round: clients, seconds, and the clients that were set aside."""
    finished = f"round {record['round']}: clients {len(record['clients'])}, {record['seconds']['round']:.1f} s"
    return "; ".join([finished, *(f"client {s['client']} set aside: {s['reason']}" for s in record["set_aside"])])


def nodes_sentence(deployment: "Deployment", name: str, online: int, needed: int) -> str:
    """One line about the nodes that a run waits for, with the command that starts more."""
    if online >= needed:
        return f"{online} of {needed} nodes are online: continuing"
    folder = deployment.folder
    more = f"fedbe flower up {folder} --nodes {needed}"
    if deployment.size() != needed:  # a node gets the number of nodes when it starts
        more = f"fedbe flower down {folder}, {more}, fedbe flower run {folder} --name {name}"
    fewer = f"; or use fewer clients (in the example app: --set clients={online})" if online else ""
    return f"{online} of {needed} nodes are online; waiting for {needed - online} more: {more}{fewer}"
