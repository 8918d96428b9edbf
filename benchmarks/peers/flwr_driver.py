"""Flower's simulation engine: Ray with one actor for each core; an actor keeps the data between its clients."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers import job as jobs


def client_app(job: jobs.Job, data: Path) -> ClientApp:
    """An app that trains one client."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        images, _ = jobs.load(data)
        model = jobs.make_model(job)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        torch.seed()
        jobs.train(model, images.of_client(int(context.node_config["partition-id"]), job), job)
        metrics = MetricRecord({"num-examples": job.images})
        reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=reply, reply_to=message)

    return app


def server_app(job: jobs.Job, data: Path) -> ServerApp:
    """An app with Flower's FedAvg."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        _, test = jobs.load(data)
        model = jobs.make_model(job)

        def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if round == 0:
                return None
            accuracy = None
            if job.is_evaluated(round):
                model.load_state_dict(arrays.to_torch_state_dict())
                accuracy = jobs.accuracy(model, test)
            jobs.report(round, accuracy)
            return None if accuracy is None else MetricRecord({"accuracy": accuracy})

        share = job.cohort / job.clients
        strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=job.clients)
        strategy.start(grid, ArrayRecord(model.state_dict()), job.rounds, evaluate_fn=evaluate)

    return app


def main(job: jobs.Job, data: Path) -> None:
    """Run the job."""
    actors: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": os.cpu_count() or 1},
    }
    run_simulation(server_app(job, data), client_app(job, data), num_supernodes=job.clients, backend_config=actors)


if __name__ == "__main__":
    main(jobs.JOBS[sys.argv[1]], Path(sys.argv[2]))
