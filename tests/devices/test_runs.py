"""Whole runs on a device: the bits of the CPU, few copies, other devices after a stop, and memory that is full."""

import json
from dataclasses import replace

import pytest
import torch

from fedbe import Plan
from fedbe.errors import RunError
from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe_files import load_recipe, override_recipe
from fedbe.experiment.round import run_round
from fedbe.experiment.run_jobs import NewRun, RunJob, execute_runs
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import make_simulation

SMALL = (
    "training.rounds=2",
    "training.epochs=1",
    "split.clients=4",
    "training.clients_per_round=2",
    "training.batch_size=80",
    "model.hidden=[16]",
    "variant=paper",
    "settings.num_samples=2",
    "settings.distill_epochs=2",
    "settings.distill_lr=0.01",
    "settings.distill_lr_min=0.004",
    "evaluation.ensemble=SA",
)
IMAGES = ("model.name=resnet20", "model.hidden=", "data.pad=1", "data.flip=true", "training.rounds=1")


@pytest.fixture
def recipe():
    return load_recipe("digits", SMALL)


@pytest.fixture
def play(tmp_path, recipe):
    """play("name", "fedbe", "emu"): train a run, with the emulated devices or without, and return its folder."""

    def train(name, method, device, recipe=recipe, should_stop=lambda: False, callback=None):
        folder = tmp_path / name
        if not folder.exists():
            run_folder.create(folder, recipe, method, 0, "float32", device)
        with Serial() as executor:
            loop.execute(folder, executor, callback or Callback(), should_stop=should_stop)
        return folder

    return train


def numbers(folder):
    """Everything that a run computed, and no times."""
    rounds = [{k: v for k, v in r.items() if k not in ("seconds", "memory_mb")} for r in run_folder.read_rounds(folder)]
    return rounds, (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        pytest.param("fedbe", (), id="fedbe"),
        pytest.param("fedbe", ("variant=auto", "settings.gate_margin=0", "settings.gate_gain=0"), id="gate"),
        pytest.param("scaffold", (), id="scaffold"),
        pytest.param("fedbe", IMAGES, id="images", marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_bits_of_the_cpu(method, changes, play, recipe, emulator, monkeypatch):
    # Threads change the last bits, and the emulated device has other kernels that use them.
    monkeypatch.setattr("fedbe.experiment.simulation.cores", lambda: 1)
    changed = override_recipe(recipe, changes)
    there = play("there", method, "emu:0", changed)
    assert emulator.used == {0}
    assert numbers(there) == numbers(play("here", method, "cpu", changed))
    info = run_folder.read_info(there)
    assert (info.device, info.made_with["device"]) == ("emu:0", "emu:0")


@pytest.mark.slow
def test_a_round_has_a_bounded_number_of_copies_and_stops(recipe, emulator):
    """Per client, member and student a few, and two per client and epoch. Stops do not grow with the steps at all.

    A step of the distillation queues two copies.
    """

    def count(epochs=1, distill_epochs=1, batch_size=80):
        training = (f"training.epochs={epochs}", f"training.batch_size={batch_size}")
        changed = override_recipe(recipe, (*training, f"settings.distill_epochs={distill_epochs}"))
        with Serial() as executor:
            federation = prepare(changed, 0)
            sim = make_simulation(changed, "fedbe", 0, "float32", federation, executor, "emu:0")
            state, _ = run_round(sim, RunState(0, sim.runner.read()), lambda *_: None)
            with emulator.counted() as counts:
                run_round(sim, state, lambda *_: None)
        return counts

    few, trained, distilled = count(), count(epochs=4), count(distill_epochs=4)
    assert trained.stops == distilled.stops == few.stops <= 30  # 2 clients, 2 samples, average and student
    assert trained.to_device - few.to_device == 2 * 2 * 3  # order and labels of 3 further epochs of 2 clients
    assert count(batch_size=20).to_device == few.to_device
    steps = -(-len(prepare(recipe, 0).server) // 128) * 3
    assert distilled.to_device - few.to_device <= 2 * steps  # a batch's indices, for the inputs and for the targets
    assert few.to_device <= 75


def test_data_is_copied_to_the_device_once(recipe, emulator):
    federation = prepare(recipe, 0)
    with emulator.counted() as counts:
        moved = federation.on(torch.device("emu:0"))
    assert counts.to_device == 6  # inputs, scale and shift of training and test data; the server's are among the first
    index = torch.arange(5)
    assert torch.equal(moved.server.batch(index).cpu(), federation.server.batch(index))
    assert federation.on(torch.device("cpu")) is federation


def test_jobs_of_this_process_and_the_server_share_the_data(recipe, emulator):
    federation = prepare(recipe, 0)
    data = sum(
        loader.compact().batch(torch.arange(len(loader))).numel() for loader in (federation.train, federation.test)
    )
    with Serial() as executor, emulator.counted() as counts:
        sim = make_simulation(recipe, "fedbe", 0, "float32", federation, executor, "emu:0")
    assert data <= counts.numbers_to_device < data + 5000  # and the weights of two models
    assert sim.federation.train is federation.train


def test_a_process_without_clients_gets_the_rows_of_the_server_alone(recipe, emulator):
    federation, index = prepare(recipe, 0), torch.arange(5)
    with emulator.counted() as counts:
        server = federation.server_on(torch.device("emu:0"))
    rows = federation.server.batch(torch.arange(len(federation.server))).numel()
    assert rows <= counts.numbers_to_device < rows + 100  # and scale and shift
    assert torch.equal(server.batch(index).cpu(), federation.server.batch(index))
    assert federation.server_on(torch.device("cpu")) is federation.server


def test_images_are_augmented_on_the_device(recipe):
    federation = prepare(override_recipe(recipe, IMAGES), 0)
    moved, index = federation.on(torch.device("emu:0")), torch.arange(9)
    batch = moved.train.batch(index, torch.Generator().manual_seed(3))
    assert batch.device == torch.device("emu:0")
    assert torch.equal(batch.cpu(), federation.train.batch(index, torch.Generator().manual_seed(3)))
    assert not torch.equal(batch.cpu(), federation.train.batch(index))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("cpu", "emu:0"), ("emu:0", "cpu")])
def test_a_run_continues_on_another_device(first, then, play):
    straight = play("straight", "fedbe", "cpu")
    rounds = lambda: len(run_folder.read_rounds(folder))  # noqa: E731
    folder = straight.with_name("moved")
    play("moved", "fedbe", first, should_stop=lambda: folder.exists() and rounds() == 1)
    assert rounds() == 1
    run_folder.move_to_device(folder, then)
    play("moved", "fedbe", then)
    assert numbers(folder) == numbers(straight)
    info = run_folder.read_info(folder)
    assert info.device == then
    assert info.made_with["device"] == f"{first}, from round 2 on {then}"


def test_a_run_from_before_devices_was_on_the_cpu(play):
    folder = play("old", "fedavg", "cpu", should_stop=lambda: True)
    path = folder / "run.json"
    old = json.loads(path.read_text())
    del old["device"], old["made_with"]["device"]
    path.write_text(json.dumps(old))
    info = run_folder.read_info(folder)
    assert info.device == "cpu"
    moved = run_folder.mark_resumed(folder, replace(info, device="emu:0"), 2)
    assert moved.made_with["device"] == "cpu, from round 2 on emu:0"


class FillMemory(Callback):
    """Fills the memory of the emulated device in a phase of round 2."""

    def __init__(self, emulator, phase, done):
        self._emulator, self._when = emulator, (2, phase, done)

    def phase(self, round, name, done, total):  # noqa: ARG002
        if (round, name, done) == self._when:
            self._emulator.memory_ends_in = 10


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "done"), [("clients", 0), ("clients", 1), ("ensemble", 1), ("distill", 1)])
def test_full_memory_is_one_sentence_and_resume_goes_on(phase, done, play, emulator):
    straight = play("straight", "fedbe", "cpu")
    with pytest.raises(RunError, match=r"memory of .* is full") as raised:
        play("full", "fedbe", "emu:0", callback=FillMemory(emulator, phase, done))
    assert "\n" not in str(raised.value)
    assert "--device" in str(raised.value)
    folder = straight.with_name("full")
    assert len(run_folder.read_rounds(folder)) == 1
    assert len(list((folder / "trained").glob("*"))) == (done if phase == "clients" else 0)
    emulator.memory_ends_in = None
    assert numbers(play("full", "fedbe", "emu:0")) == numbers(straight)


@pytest.mark.parametrize(
    "full",
    [
        RuntimeError("MPS backend out of memory (MPS allocated: 8.93 GB). Tried to allocate 1 MB on private pool."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    ],
    ids=["mps", "cublas", "cuda"],
)
@pytest.mark.parametrize(("phase", "done"), [("clients", 0), ("ensemble", 1)])
def test_every_form_of_full_memory_stops_the_run(full, phase, done, play, emulator):
    emulator.full = full
    with pytest.raises(RunError, match=r"memory of .* is full") as raised:
        play("full", "fedbe", "emu:0", callback=FillMemory(emulator, phase, done))
    assert "\n" not in str(raised.value)


def test_workers_take_devices_in_turn():
    plan = Plan(device="emu:0,1")
    assert [plan.for_worker(i).device for i in range(3)] == ["emu:0", "emu:1", "emu:0"]
    assert plan.compute_device(torch.device("cpu")) == torch.device("emu:0")
    assert Plan(device="emu").device == "emu:0"


def test_whole_runs_take_the_device_of_their_worker(recipe, tmp_path, emulator):
    # No steps: torch computes no gradients on the second emulated device.
    first = override_recipe(recipe, ["training.rounds=1", "training.epochs=0"])
    jobs = [RunJob(tmp_path / str(seed), NewRun(first, "fedavg", seed, "float32", "emu:0,1")) for seed in range(3)]
    with Serial() as executor:  # one worker
        assert execute_runs(jobs[:2], executor, Callback(), lambda: False, whole=True)
    assert emulator.used == {0}
    emulator.used.clear()
    assert jobs[2].for_worker(1).run().finished
    assert emulator.used == {1}
