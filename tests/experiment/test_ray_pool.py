"""Workers on a real Ray cluster of three nodes on this machine: the same bits, lost nodes, a killed driver."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbe.core.compute import Plan
from fedbe.data import Dataset, Task
from fedbe.errors import RunError, SettingError
from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors import make_executor
from fedbe.experiment.executors.base import Done, Failed, Lost, Stopped
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.executors.ray_pool import SHARED_BYTES, RayPool
from fedbe.experiment.federation import Federation, prepare
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import load_recipe, override_recipe
from fedbe.experiment.run_jobs import RunJob, execute_runs

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]  # Ray leaves sockets and processes to the system
ray = pytest.importorskip("ray")

Identical = Callable[[Path, Path], bool]


@dataclass(frozen=True, eq=False)
class Look:
    """What a job sees on a node."""

    values: torch.Tensor
    diary: Path
    deaths: int = 0
    name: str = "look"

    def run(self, federation: Any, runner: Any) -> tuple[float, int, int]:  # noqa: ARG002
        died = self.diary.stat().st_size if self.diary.exists() else 0
        if died < self.deaths:
            with self.diary.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.deaths < 0:
            raise ValueError("three is not four")
        return float(self.values.sum()), torch.get_num_threads(), os.getpid()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # Ray's workers give way to others
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    nodes.add_node(**node)
    nodes.add_node(**node)
    yield nodes
    nodes.shutdown()


@pytest.fixture
def head() -> Iterator[Any]:
    """A cluster of its own, to be killed."""
    from ray.cluster_utils import Cluster

    alone = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield alone
    alone.shutdown()


@pytest.fixture(scope="module")
def pool(cluster: Any) -> Iterator[RayPool]:
    with RayPool(3, cluster.address) as workers:
        yield workers


@pytest.fixture
def larger(small: Recipe) -> Recipe:
    """A model that is an object of its own."""
    recipe = override_recipe(small, ["training.rounds=2", "model.hidden=[150, 150]"])
    assert SHARED_BYTES < 4 * 150 * 150
    return recipe


def test_a_run_has_the_bits_of_worker_processes(
    tmp_path: Path, pool: RayPool, larger: Recipe, identical: Identical
) -> None:
    folders = [run_folder.create(tmp_path / name, larger, "fedbe+scaffold", 0, "float32") for name in ("ray", "here")]
    assert loop.execute(folders[0], pool, Callback())
    with ProcessPool(1) as here:
        assert loop.execute(folders[1], here, Callback())
    assert identical(*folders)
    assert run_folder.read_rounds(folders[0])[0]["memory_mb"]["train"] > 100


def test_jobs_keep_their_order_and_survive_their_actor(tmp_path: Path, pool: RayPool, small: Recipe) -> None:
    pool.configure(prepare(small, 0), Plan())
    large = torch.arange(30_000.0)
    jobs = [Look(large, tmp_path / "none") for _ in range(4)]
    jobs += [Look(torch.ones(2), tmp_path / "twice", deaths=2), Look(large, tmp_path / "none", deaths=-1)]
    *same, twice, raised = pool.map(jobs)
    assert all(isinstance(outcome, Done) and outcome.value[:2] == (float(large.sum()), 1) for outcome in same)
    assert isinstance(twice, Done)
    assert twice.value[0] == 2.0
    assert raised == Failed("ValueError: three is not four")
    (lost,) = pool.map([Look(large, tmp_path / "always", deaths=9)])
    assert isinstance(lost, Lost)
    assert "died or hung 3 times" in lost.reason
    with pytest.raises(Stopped):
        list(pool.map(jobs, should_stop=lambda: True))


def test_a_tensor_that_changes_travels_again(tmp_path: Path, pool: RayPool, small: Recipe) -> None:
    pool.configure(prepare(small, 0), Plan())
    large = torch.ones(30_000)
    sums = []
    for factor in (1, 2):
        large.mul_(factor)
        (outcome,) = pool.map([Look(large, tmp_path / "none")])
        assert isinstance(outcome, Done)
        sums.append(outcome.value[0])
    assert sums == [30_000.0, 60_000.0]


class Unreadable:
    """A federation that a node cannot read, as when a package is missing there."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("not on this node")


def test_a_node_that_cannot_read_the_data_sets_no_client_aside(tmp_path: Path, pool: RayPool) -> None:
    pool.configure(Unreadable(), Plan())  # type: ignore[arg-type]
    (outcome,) = pool.map([Look(torch.ones(2), tmp_path / "none")])
    assert isinstance(outcome, Lost)
    assert "not on this node" in outcome.reason


HOOKS = '''
"""What Ray's worker processes call when they start."""
import os
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fedbe":
            raise ModuleNotFoundError(f"No module named '{name}'")


def without_fedbe():
    sys.meta_path.insert(0, Missing())


def with_other_torch():
    import torch
    torch.__version__ = "1.0+cpu"


def dies():
    os.chdir = lambda _: os._exit(1)  # an actor calls it first
'''
START = """
import os, sys, ray
from fedbe.errors import RunError
from fedbe.experiment.executors import ray_pool
ray_pool.START_SECONDS = 6.0
environment = {"worker_process_setup_hook": sys.argv[1], "env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
ray.init(
    address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,
    _node_ip_address="127.0.0.1", runtime_env=environment,
)
try:
    with ray_pool.RayPool(1) as pool:
        list(pool.map(["never started"]))
except RunError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("without_fedbe", "a node of the Ray cluster cannot run fedbe: .*No module named 'fedbe'"),
        ("with_other_torch", "a node of the Ray cluster has torch 1.0, and this machine has 2"),
        ("dies", "no worker could start on the Ray cluster in 6 s"),
    ],
)
def test_a_node_that_cannot_start_a_worker_is_one_sentence(hook: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hooks_for_tests.py").write_text(HOOKS)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", START, f"hooks_for_tests.{hook}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONPATH": paths})
    # Ray prints lines of its own to the same place, before and after ours.
    assert re.search(f"^{message}", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_data_travels_once_a_run_and_the_model_once_a_round(
    tmp_path: Path, pool: RayPool, larger: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients of a round, and the evaluation, share one object with the model."""
    recipe = override_recipe(larger, ["training.rounds=3", "evaluation.ensemble=", "evaluation.clients=false"])
    put = ray.put
    federations, arrays = 0, list[bytes]()

    def counted(value: Any) -> Any:
        nonlocal federations
        federations += isinstance(value, Federation)
        if isinstance(value, np.ndarray):
            arrays.append(hashlib.sha256(value).digest())
        return put(value)

    monkeypatch.setattr(ray, "put", counted)
    folder = run_folder.create(tmp_path / "counted", recipe, "fedavg", 0, "float32")
    assert loop.execute(folder, pool, Callback())
    assert federations == 1
    assert len(arrays) == len(set(arrays)), "something was put twice"
    models = 1 + 3  # the first, and one of each round: evaluated, then sent to the clients
    assert len(arrays) == models + 1  # the images; everything else of the federation is smaller and travels within it


def test_a_thousand_clients(tmp_path: Path, pool: RayPool, identical: Identical) -> None:
    """A cohort of 100 of 1,000 clients on three nodes has the bits of one process."""
    draw = torch.Generator().manual_seed(0)
    train, test = (
        Dataset(name, torch.randn(count, 16, generator=draw), torch.arange(count) % 4, tuple("abcd"))
        for name, count in (("train", 4100), ("test", 200))
    )
    many = ["split.kind=iid", "split.clients=1000", "training.clients_per_round=100", "training.rounds=2"]
    few = ["data.server=100", "training.epochs=1", "model.hidden=[150, 150]", "settings.num_samples=2"]
    recipe = load_recipe("digits", [*many, *few, "settings.distill_epochs=1", "settings.members=SA", "variant=paper"])
    folders = [run_folder.create(tmp_path / name, recipe, "fedbe", 0, "float32") for name in ("ray", "here")]
    assert loop.execute(folders[0], pool, Callback(), task=Task(train, test))
    with make_executor(0) as here:
        assert loop.execute(folders[1], here, Callback(), task=Task(train, test))
    assert identical(*folders)
    first, second = (set(record["clients"]) for record in run_folder.read_rounds(folders[0]))
    assert len(first) == len(second) == 100
    assert len(first | second) > 150


def test_a_node_is_lost_in_the_middle_of_a_round(
    tmp_path: Path, cluster: Any, pool: RayPool, larger: Recipe, identical: Identical
) -> None:
    slow = override_recipe(larger, ["training.epochs=20"])
    folders = [run_folder.create(tmp_path / name, slow, "fedavg", 0, "float32") for name in ("lost", "whole")]
    lost = next(node for node in cluster.worker_nodes)

    class LoseNode(Callback):
        killed = False

        def phase(self, round: int, phase: str, done: int, total: int) -> None:  # noqa: ARG002
            if (round, phase, done) == (2, "clients", 1) and not self.killed:
                self.killed = True
                cluster.remove_node(lost, allow_graceful=False)

    callback = LoseNode()
    assert loop.execute(folders[0], pool, callback)
    assert callback.killed
    with ProcessPool(1) as here:
        assert loop.execute(folders[1], here, Callback())
    assert identical(*folders)


def test_whole_runs_on_the_cluster(tmp_path: Path, pool: RayPool, small: Recipe, identical: Identical) -> None:
    folders = [run_folder.create(tmp_path / f"{name}", small, "fedavg", 0, "float32") for name in ("ray", "here")]
    assert execute_runs([RunJob(folders[0])], pool, Callback(), lambda: False, whole=True)
    with make_executor(0) as here:
        assert loop.execute(folders[1], here, Callback())
    assert identical(*folders)


@pytest.mark.parametrize("killed", ["driver", "head"])
def test_a_killed_driver_or_head_loses_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, small: Recipe, identical: Identical, killed: str
) -> None:
    slow = override_recipe(small, ["training.epochs=20", "training.rounds=6"])
    folders = [run_folder.create(tmp_path / name, slow, "fedavg", 0, "float32") for name in ("killed", "whole")]
    cluster = request.getfixturevalue("cluster" if killed == "driver" else "head")
    command = [sys.executable, "-m", "fedbe", "resume", str(folders[0]), "-q", "--executor", "ray"]
    impatient = os.environ | {"RAY_gcs_rpc_server_reconnect_timeout_s": "2"}  # Ray's own is a minute
    with subprocess.Popen([*command, "--address", cluster.address, "--workers", "1"], env=impatient) as driver:
        until = time.monotonic() + 300
        while not run_folder.read_rounds(folders[0]):
            assert time.monotonic() < until
            assert driver.poll() is None
            time.sleep(0.05)
        if killed == "driver":
            driver.kill()
        else:
            cluster.remove_node(cluster.head_node, allow_graceful=False)
        assert driver.wait(timeout=180)
    assert run_folder.rounds_left(folders[0])
    with make_executor(0) as here:
        assert loop.execute(folders[0], here, Callback())
        assert loop.execute(folders[1], here, Callback())
    assert identical(*folders)


def test_a_worker_that_fits_nowhere_is_one_sentence(cluster: Any, pool: RayPool) -> None:  # noqa: ARG001 (connects)
    with pytest.raises(RunError, match=r"needs 1 CPUs and 1 GPUs, .*cluster has"):
        RayPool(address=cluster.address, num_gpus=1)
    with pytest.raises(RunError, match=r"[46] CPUs and 0 GPUs: use --device cpu"):
        make_executor(kind="ray", address=cluster.address, gpus_per_worker=0.25)
    with pytest.raises(RunError, match=r"needs 3 CPUs and 0 GPUs, .* on [23] nodes"):
        make_executor(kind="ray", address=cluster.address, cpus_per_worker=3)
    with pytest.raises(SettingError, match=r"the GPUs of a worker must be .* got 1.5"):
        RayPool(address=cluster.address, num_gpus=1.5)


def test_without_a_cluster_there_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedbe", "run", "--executor", "ray", "--address", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert "cannot connect to the Ray cluster '127.0.0.1:1'" in done.stderr
    assert "Traceback" not in done.stderr
