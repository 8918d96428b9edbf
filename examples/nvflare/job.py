"""Run the job in NVFlare's simulator, or export it for `nvflare job submit`.

python job.py --method fedbe --rounds 3
python job.py --export jobs
"""

import argparse
from pathlib import Path

from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from task import CLIENTS

from fedbe.nvflare import MethodController

HERE = Path(__file__).parent


def main() -> None:
    """Make the job from the arguments, then run or export it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="fedbe", help="`fedbe methods` lists them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="runs/digits", help="checkpoints, report and model; continued if it exists")
    parser.add_argument("--workspace", default="workspace", help="where NVFlare's simulator works")
    parser.add_argument("--export", help="write the job into this folder instead of running it")
    arguments = parser.parse_args()
    job = FedJob(name=f"digits-{arguments.method}")
    controller = MethodController(
        method=arguments.method,
        model="task:Net",
        unlabeled="task:server_images",
        settings={"seed": 0},
        folder=str(Path(arguments.folder).resolve()),
        num_rounds=arguments.rounds,
        timeout=600,
    )
    job.to_server(controller)
    job.add_file_to_server(str(HERE / "task.py"))
    job.to_clients(ScriptRunner(script=str(HERE / "client.py")))
    job.add_file_to_clients(str(HERE / "task.py"))
    if arguments.export:
        job.export_job(arguments.export)
    else:
        job.simulator_run(arguments.workspace, n_clients=CLIENTS)


if __name__ == "__main__":
    main()
