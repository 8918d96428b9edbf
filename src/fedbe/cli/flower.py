"""`fedbe flower`: an app, keys, a deployment on this machine, a run. Commands import Flower when they need it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbe.cli.console import out

if TYPE_CHECKING:
    from fedbe.flower.deployment import Deployment

app = typer.Typer(help="Federations with Flower: a new app, keys, a deployment, a run.", no_args_is_help=True)

AppFolder = Annotated[Path, typer.Argument(help="The folder of the app.", metavar="DIR")]
NumNodes = Annotated[int, typer.Option(min=1, help="The number of nodes (clients) in the federation.")]


@app.command()
def new(folder: AppFolder) -> None:
    """Write a complete Flower app that learns handwritten digits, as a starting point."""
    from fedbe.flower import template

    template.write_app(folder)
    out.print(f"a Flower app is in {folder}; read {folder / 'README.md'}")


@app.command()
def certs(
    folder: AppFolder,
    nodes: NumNodes = 3,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address by which nodes on other machines reach the server.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are valid, in days.")] = 365,
) -> None:
    """Create a certificate authority, the server's certificate and a key for each node, readable by you only."""
    from fedbe.flower import certs

    path = certs.create(folder, nodes, host or (), days)
    out.print(f"keys and certificates are in {path}; keep ca.key on another machine")


@app.command()
def up(folder: AppFolder, nodes: NumNodes = 3) -> None:
    """Start a SuperLink with TLS and node authentication, and SuperNodes, on 127.0.0.1."""
    from fedbe.flower.deployment import Deployment

    Deployment(folder).up(nodes, lambda line: out.print(line))
    out.print(f"logs: {folder / 'state'}; train with: fedbe flower run {folder}; stop with: fedbe flower down {folder}")


@app.command()
def run(
    folder: AppFolder,
    name: Annotated[str | None, typer.Option(help="The name of the run. A run of this name is resumed.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the app, e.g. rounds=5.")
    ] = None,
) -> None:
    """Train the app on the deployment, show each round, and show where the model is."""
    from fedbe.flower import submission
    from fedbe.flower.deployment import Deployment

    deployment = Deployment(folder)
    run_id, path = submission.submit(deployment, name, settings or (), lambda line: out.print(line))
    out.print(f"run {run_id} is submitted; results: {path}")
    try:
        result = submission.follow(
            deployment,
            run_id,
            path,
            lambda line: out.print(round_sentence(line)),
            lambda online, needed: out.print(nodes_sentence(deployment, path.name, online, needed)),
        )
    except KeyboardInterrupt:
        home = deployment.state / "flwr"
        out.print(f"\nno longer following; the run continues. Stop it with: FLWR_HOME={home} flwr stop {run_id} fedbe")
        raise typer.Exit(130) from None
    accuracy = result.report.get("server", {}).get(str(result.rounds), {}).get("accuracy")
    accuracy_text = f", accuracy {100 * accuracy:.1f} %" if accuracy is not None else ""
    out.print(f"finished after round {result.rounds}{accuracy_text}. Model: {path / 'model.safetensors'}")


@app.command()
def down(folder: AppFolder) -> None:
    """Stop what `up` started in this folder. Runs, keys and the database are kept."""
    from fedbe.flower.deployment import Deployment

    stopped = Deployment(folder).down()
    out.print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


def round_sentence(line: dict[str, Any]) -> str:
    """One line about a finished round: clients, seconds, and the clients that were set aside."""
    summary = f"round {line['round']}: clients {len(line['clients'])}, {line['seconds']['round']:.1f} s"
    return "; ".join([summary, *(f"client {s['client']} set aside: {s['reason']}" for s in line["set_aside"])])


def nodes_sentence(deployment: "Deployment", name: str, online: int, needed: int) -> str:
    """How many nodes are online and, if they are too few, the commands that start more."""
    if online >= needed:
        return f"{online} of {needed} nodes are online: continuing"
    folder = deployment.folder
    commands = f"fedbe flower up {folder} --nodes {needed}"
    if deployment.size() != needed:  # a node gets the number of nodes when it starts, so all must start again
        commands = f"fedbe flower down {folder}, {commands}, fedbe flower run {folder} --name {name}"
    fewer = f"; or train with fewer (in the example: --set clients={online})" if online else ""
    return f"{online} of {needed} nodes are online; waiting for {needed - online} more: {commands}{fewer}"
