"""fedbe: its simulator with worker processes, a run folder and checkpoints, as `fedbe run` does it."""

import sys
import tempfile
from pathlib import Path


def main(name: str, data: Path) -> None:
    """Run the job."""
    from fedbe.experiment.executors.forkserver import warm_up

    warm_up()  # as the command line: the process that workers fork from imports torch while this one does
    from benchmarks.peers.job import JOBS, load, report
    from fedbe.data import Dataset, Task
    from fedbe.experiment import loop, run_folder
    from fedbe.experiment.callbacks import Callback
    from fedbe.experiment.executors import make_executor
    from fedbe.experiment.recipe_files import load_recipe
    from fedbe.experiment.run_folder import Record

    class Report(Callback):
        """Reports each round."""

        def round_ended(self, record: Record) -> None:
            report(record["round"], record["test"]["accuracy"] if "test" in record else None)

    job = JOBS[name]
    train, test = (Dataset("cifar10", part.pixels, part.labels, tuple("abcdefghij")) for part in load(data))
    recipe = load_recipe(
        "digits",
        [
            f"data.server={len(train) - job.clients * job.images}",
            f"data.pad={2 if job.augment else 0}", f"data.flip={str(job.augment).lower()}",
            "split.kind=iid", f"split.clients={job.clients}",
            f"model.name={'convnet' if job.model == 'convnet' else 'benchmarks.peers.job:cnn'}",
            f"training.rounds={job.rounds}", f"training.clients_per_round={job.cohort}", "training.epochs=1",
            f"training.batch_size={job.batch_size}", f"training.lr={job.lr}", f"training.momentum={job.momentum}",
            f"training.weight_decay={job.weight_decay}", "training.schedule=constant",
            f"evaluation.every={job.rounds if job.evaluate_every > 1 else 1}",
            "evaluation.ensemble=", "evaluation.clients=false",
        ],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as parent, make_executor(None, "processes") as executor:
        folder = run_folder.create(Path(parent) / "run", recipe, "fedavg", 0, "float32")
        loop.execute(folder, executor, Report(), task=Task(train, test))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
