"""`fedbe flower`: an app, keys, a deployment on this machine, a run. Commands import Flower when they need it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbe.cli.console import out

if TYPE_CHECKING:
    from fedbe.flower.deployment import Deployment

app = typer.Typer(help="Federations with Flower: a new app, keys, a deployment, a run.", no_args_is_help=True)

Dir = Annotated[Path, typer.Argument(help="The folder of the app.", metavar="DIR")]
Nodes = Annotated[int, typer.Option(min=1, help="How many nodes (clients) the federation has.")]


@app.command()
def new(folder: Dir) -> None:
    """Write a complete Flower app that learns handwritten digits: the place to start from."""
    from fedbe.flower import template

    template.write(folder)
    out.print(f"a Flower app is in {folder}; read {folder / 'README.md'}")


@app.command()
def certs(
    folder: Dir,
    nodes: Nodes = 3,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address by which nodes on other machines reach the server.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are valid.")] = 365,
) -> None:
    """Make an authority, the server's certificate and a key for each node, readable by you only."""
    from fedbe.flower import certs as keys

    place = keys.make(folder, nodes, host or (), days)
    out.print(f"keys and certificates are in {place}; ca.key is best kept on another machine")


@app.command()
def up(folder: Dir, nodes: Nodes = 3) -> None:
    """Start a SuperLink with TLS and node authentication, and SuperNodes, on 127.0.0.1."""
    from fedbe.flower.deployment import Deployment

    Deployment(folder).up(nodes, lambda line: out.print(line))
    out.print(f"logs: {folder / 'state'}; train with: fedbe flower run {folder}; stop with: fedbe flower down {folder}")


@app.command()
def run(
    folder: Dir,
    name: Annotated[str | None, typer.Option(help="Name of the run; one that was stopped goes on.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the app, e.g. rounds=5.")
    ] = None,
) -> None:
    """Train the app on the deployment, follow it, and show where model and report are."""
    from fedbe.flower import submission
    from fedbe.flower.deployment import Deployment

    deployment = Deployment(folder)
    number, place = submission.submit(deployment, name, changes or (), lambda line: out.print(line))
    out.print(f"run {number} is submitted; results: {place}")
    try:
        outcome = submission.follow(
            deployment,
            number,
            place,
            lambda line: out.print(_told(line)),
            lambda online, needed: out.print(_nodes(deployment, place.name, online, needed)),
        )
    except KeyboardInterrupt:
        home = deployment.state / "flwr"
        out.print(f"\nno longer following; the run goes on. Stop it with: FLWR_HOME={home} flwr stop {number} fedbe")
        raise typer.Exit(130) from None
    accuracy = outcome.report.get("server", {}).get(str(outcome.rounds), {}).get("accuracy")
    found = f", accuracy {100 * accuracy:.1f} %" if accuracy is not None else ""
    out.print(f"done after round {outcome.rounds}{found}. Model: {place / 'model.safetensors'}")


@app.command()
def down(folder: Dir) -> None:
    """Stop what `up` started in this folder; runs, keys and the database stay."""
    from fedbe.flower.deployment import Deployment

    stopped = Deployment(folder).down()
    out.print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


def _told(line: dict[str, Any]) -> str:
    done = f"round {line['round']}: clients {len(line['clients'])}, {line['seconds']['round']:.1f} s"
    return "; ".join([done, *(f"client {s['client']} set aside: {s['reason']}" for s in line["set_aside"])])


def _nodes(deployment: "Deployment", name: str, online: int, needed: int) -> str:
    if online >= needed:
        return f"{online} of {needed} nodes are online: going on"
    folder = deployment.folder
    more = f"fedbe flower up {folder} --nodes {needed}"
    if deployment.size() != needed:  # a node is told when it starts how many there are
        more = f"fedbe flower down {folder}, {more}, fedbe flower run {folder} --name {name}"
    fewer = f"; or ask for fewer (the example: --set clients={online})" if online else ""
    return f"{online} of {needed} nodes are online; waiting for {needed - online} more: {more}{fewer}"
