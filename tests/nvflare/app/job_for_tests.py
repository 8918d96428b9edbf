"""python job_for_tests.py '{"method": …}' WORKSPACE: run the federation of the tests in NVFlare's simulator."""

import json
import sys
from pathlib import Path

import federation_for_tests as task
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner

from fedbe.nvflare import MethodController

HERE = Path(__file__).parent

if __name__ == "__main__":
    job = FedJob(name="tests")
    paths = {"model": "federation_for_tests:model", "unlabeled": "federation_for_tests:server_inputs"}
    job.to_server(MethodController(**paths, **json.loads(sys.argv[1])))
    job.to_clients(ScriptRunner(script=str(HERE / "client_for_tests.py")))
    for add in (job.add_file_to_server, job.add_file_to_clients):
        add(str(HERE / "federation_for_tests.py"))
    job.simulator_run(sys.argv[2], n_clients=task.CLIENTS)
