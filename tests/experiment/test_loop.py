"""Runs: their folder, cohorts, clients that fail, stops, and the final model."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedbe
from fedbe import data
from fedbe.errors import AggregationError, DataError, RecipeError, RunError, RunWarning, SettingError
from fedbe.experiment import loop, provenance, run_folder, saved_model
from fedbe.experiment.callbacks import Callback, EndStatus
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import load_recipe, override_recipe
from fedbe.experiment.run_folder import Record
from fedbe.experiment.simulation import Simulation
from fedbe.experiment.tensor_files import read_tensors, write_tensors

Play = Callable[..., Path]


def test_a_run_folder_is_complete(play: Play) -> None:
    folder = play("whole", "fedbe")
    info = run_folder.read_info(folder)
    assert (info.method, info.seed, info.precision) == ("fedbe", 0, "float32")
    assert {"fedbe", "commit", "torch", "python", "machine"} <= set(info.made_with)
    records = run_folder.read_rounds(folder)
    assert [r["round"] for r in records] == [1, 2, 3]
    assert info.final == records[-1]["test"]
    last = records[-1]
    for name in ("test", "test_average", "test_ensemble"):
        assert {"accuracy", "nll", "ece", "confidence"} <= set(last[name])
    assert len(last["test_clients"]) == len(last["clients"]) == 3
    assert {"average", "ensemble", "student", "disagreement", "members"} <= set(last["server"])
    assert {"train", "fit", "ensemble", "distill", "test", "round"} <= set(last["seconds"])
    assert set(last["memory_mb"]) == {"train", "server", "test"}
    assert all(mb > 100 for mb in last["memory_mb"].values())  # torch alone is more


class End(Callback):
    """Keeps how a run ended; may raise an error after the first round."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.status = error, "none"

    def round_ended(self, record: Record) -> None:  # noqa: ARG002
        if self.error is not None:
            raise self.error

    def end(self, status: EndStatus) -> None:
        self.status = status


def test_a_callback_learns_how_the_run_ended(tmp_path: Path, small: Recipe) -> None:
    folder = run_folder.create(tmp_path / "run", small, "fedavg", 0, "float32")
    for error, status in ((ValueError("a bug"), "failed"), (KeyboardInterrupt(), "stopped")):
        callback = End(error)
        with pytest.raises(type(error)):
            loop.execute(folder, Serial(), callback)
        assert callback.status == status
    for stop in (True, False):
        callback = End()
        assert loop.execute(folder, Serial(), callback, should_stop=lambda stop=stop: stop) is not stop
        assert callback.status == ("stopped" if stop else "finished")


def test_a_run_whose_model_cannot_be_written_has_failed(tmp_path: Path, small: Recipe) -> None:
    folder = run_folder.create(tmp_path / "run", small, "fedavg", 0, "float32")
    (folder / run_folder.MODEL_FILE).mkdir()
    callback = End()
    with pytest.raises(RunError):
        loop.execute(folder, Serial(), callback)
    assert callback.status == "failed"
    (folder / run_folder.MODEL_FILE).rmdir()
    assert loop.execute(folder, Serial(), callback)
    assert callback.status == "finished"


def test_the_known_mix_of_the_servers_inputs_is_not_that_of_the_test_data(play: Play, small: Recipe) -> None:
    mixed, plain = ("training.rounds=1", "settings.class_mix=[90,1,1,1,1,1,1,1,1,2]"), ("training.rounds=1",)
    first, second = (
        run_folder.read_rounds(play(name, "fedbe", recipe=override_recipe(small, changes), workers=Serial()))[-1]
        for name, changes in (("mixed", mixed), ("plain", plain))
    )
    assert first["test_ensemble"] == second["test_ensemble"]
    assert first["server"]["ensemble"] != second["server"]["ensemble"]


def test_bytes_count_every_tensor_once(play: Play) -> None:
    # digits through 16 hidden units: 64·16 + 16 + 16·10 + 10 = 1,210 numbers of 4 bytes, to and from 3 clients
    last = run_folder.read_rounds(play("plain", "fedavg"))[-1]
    assert last["bytes"] == {"down": 3 * 1210 * 4, "up": 3 * 1210 * 4}
    # SCAFFOLD's control variates double it
    last = run_folder.read_rounds(play("controls", "scaffold"))[-1]
    assert last["bytes"] == {"down": 2 * 3 * 1210 * 4, "up": 2 * 3 * 1210 * 4}


def test_the_average_in_the_record_is_what_the_student_started_from(play: Play) -> None:
    """FedBE's first round starts like FedAvg's: its average has FedAvg's accuracy."""
    fedavg, fedbe_run = (run_folder.read_rounds(play(m, m))[0] for m in ("fedavg", "fedbe"))
    assert fedbe_run["test_average"] == fedavg["test"]
    assert fedbe_run["test"] != fedavg["test"]


def test_the_cohort_is_a_function_of_seed_and_round(play: Play) -> None:
    cohorts = [r["clients"] for r in run_folder.read_rounds(play("a", "fedavg"))]
    assert cohorts == [r["clients"] for r in run_folder.read_rounds(play("b", "fedavg"))]
    other = [r["clients"] for r in run_folder.read_rounds(play("c", "fedavg", seed=5))]
    assert cohorts != other
    assert all(len(set(c)) == 3 for c in cohorts)


def test_a_thousand_clients_with_a_cohort_of_ten(play: Play, small: Recipe) -> None:
    many = override_recipe(
        small,
        ["split.kind=iid", "split.clients=1000", "training.clients_per_round=10", "training.rounds=2"],
    )
    many = many.model_copy(
        update={"split": many.split.model_copy(update={"major_classes": None, "minor_images": None})}
    )
    folder = play("many", "scaffold", recipe=many)
    records = run_folder.read_rounds(folder)
    assert all(len(r["clients"]) == 10 for r in records)
    assert len({c for r in records for c in r["clients"]}) > 10


def test_each_client_can_have_its_own_epochs(small: Recipe, pool: ProcessPool) -> None:
    recipe = override_recipe(small, ["training.epochs=[1, 20]", "split.clients=10", "training.clients_per_round=10"])
    sim = Simulation(recipe, recipe.method_for(), 0, prepare(recipe, 0), None, pool)  # type: ignore[arg-type]
    drawn = [sim.epochs(1, c) for c in range(10)]
    assert drawn == [sim.epochs(2, c) for c in range(10)]
    assert len(set(drawn)) > 3
    assert all(1 <= e <= 20 for e in drawn)


def test_epochs_can_be_drawn_again_in_each_round(small: Recipe, pool: ProcessPool) -> None:
    changes = ["training.epochs=[1, 20]", "training.redraw_epochs=true", "split.clients=10"]
    recipe = override_recipe(small, changes)
    sim = Simulation(recipe, recipe.method_for(), 0, prepare(recipe, 0), None, pool)  # type: ignore[arg-type]
    first, second = ([sim.epochs(r, c) for c in range(10)] for r in (1, 2))
    assert first != second
    assert first == [sim.epochs(1, c) for c in range(10)]
    assert sim.local_settings(2, 3).epochs == second[3]


def test_a_measured_ensemble_is_not_part_of_the_step(play: Play, small: Recipe) -> None:
    (record, *_) = run_folder.read_rounds(
        play("watched", "fedavg", recipe=override_recipe(small, ["evaluation.ensemble=SAC"]))
    )
    assert "test_ensemble" in record
    assert "fit" not in record["seconds"]


def test_the_phases_of_a_round_are_counted_once(play: Play, small: Recipe) -> None:
    recipe = override_recipe(
        small, ["evaluation.ensemble=SAC", "settings.distill_until=0.5", "settings.num_samples=40"]
    )
    first, *_, last = run_folder.read_rounds(play("shared", "fedbe", recipe=recipe))
    for record in (first, last):
        phases = {name: value for name, value in record["seconds"].items() if name != "round"}
        assert sum(phases.values()) <= record["seconds"]["round"]
    assert first["seconds"]["fit"] > 0
    assert "distill" not in last["seconds"]
    assert not {"fit", "ensemble"} & set(last["seconds"])  # measured, but no part of a step that does not distil


def test_clients_of_zero_epochs_have_no_loss(play: Play, small: Recipe) -> None:
    one_of_both = override_recipe(small, ["training.epochs=[0, 1]"])
    records = run_folder.read_rounds(play("some", "fedavg", recipe=one_of_both))
    assert all(0 < r["train_loss"] < 10 for r in records)
    (first, *_) = run_folder.read_rounds(play("none", "fedavg", recipe=override_recipe(small, ["training.epochs=0"])))
    assert first["train_loss"] is None


def test_one_round_methods_run_one_long_round(play: Play) -> None:
    folder = play("long", "1-ensemble")
    (record,) = run_folder.read_rounds(folder)
    assert record["test"]["accuracy"] == pytest.approx(record_vote(folder))


def record_vote(folder: Path) -> float:
    """1-Ensemble's accuracy, computed from the saved members."""
    test = data.load_task("digits").test
    return saved_model.load_trained_model(folder).metrics(test.inputs, test.labels).accuracy


@pytest.mark.parametrize("method", ["fedavg", "1-ensemble"])
def test_the_saved_model_gives_the_recorded_accuracy(method: str, play: Play) -> None:
    folder = play(method, method)
    final = run_folder.read_info(folder).final
    assert final is not None
    assert record_vote(folder) == pytest.approx(final["accuracy"])


def test_load_model_returns_the_module(play: Play) -> None:
    folder = play("fedavg", "fedavg")
    module = fedbe.load_model(folder)
    assert isinstance(module, torch.nn.Module)
    assert not module.training
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_predicting_image_files(play: Play, tmp_path: Path) -> None:
    loaded = saved_model.load_trained_model(play("fedavg", "fedavg"))
    test = data.load_task("digits").test
    big = Image.fromarray(test.inputs[0, :, :, 0].numpy()).resize((80, 80), Image.Resampling.NEAREST)
    big.save(tmp_path / "digit.png")
    images = saved_model.read_image(tmp_path / "digit.png", loaded.spec.shape)
    assert images.shape == (1, 8, 8, 1)
    with pytest.raises(DataError, match=r"shape \[1, 8, 8\], got \[1, 8, 7\]"):
        loaded.predict_proba(images[:, :, :7])
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=r"text\.png is not an image"):
        saved_model.read_image(tmp_path / "text.png", loaded.spec.shape)
    with pytest.raises(DataError, match="does not exist"):
        saved_model.read_image(tmp_path / "none.png", loaded.spec.shape)


def test_an_unfinished_or_foreign_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no model\.safetensors"):
        saved_model.load_trained_model(tmp_path)
    with pytest.raises(RunError, match="is not a run folder"):
        run_folder.read_info(tmp_path)


def test_an_existing_folder_is_refused(play: Play, small: Recipe) -> None:
    folder = play("taken", "fedavg")
    with pytest.raises(RunError, match="exists already"):
        run_folder.create(folder, small, "fedavg", 0, "float32")


def test_an_unwritable_folder_is_an_error_at_once(tmp_path: Path, small: Recipe) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot create"):
        run_folder.create(tmp_path / "file" / "run", small, "fedavg", 0, "float32")


def test_a_full_disk_loses_nothing(tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any) -> None:
    """A limit on file sizes is a full disk that needs no disk: the checkpoint cannot be written."""
    folder = run_folder.create(tmp_path / "full", small, "fedavg", 0, "float32")
    loop.execute(folder, pool, silent, should_stop=silent.rounds_ended(1))
    before = {p.name: p.read_bytes() for p in folder.glob("checkpoint-*")}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class FillsTheDisk(type(silent)):
        def phase(self, round: int, phase: str, done: int, total: int) -> None:  # noqa: ARG002
            if phase == "evaluate":
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

    try:
        with pytest.raises(RunError, match=r"cannot write .*(checkpoint-000002|rounds)"):
            loop.execute(folder, pool, FillsTheDisk())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name: p.read_bytes() for p in folder.glob("checkpoint-*")} == before
    assert not list(folder.glob(".*.part"))
    assert loop.execute(folder, pool, silent)


@pytest.mark.e2e
def test_two_processes_must_not_train_one_run(tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any) -> None:
    folder = run_folder.create(tmp_path / "locked", small, "fedavg", 0, "float32")
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(folder / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match="another process"), run_folder.discard_on_error(folder):
            loop.execute(folder, pool, silent)
        assert (folder / "run.json").exists()  # the other one's, who has nothing to show yet
        other.communicate()


OWN = '''
"""A user's own model and data."""
import os
import numpy as np
import torch
from torch import nn


def model(classes, shape, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], width), nn.ReLU(), nn.Linear(width, classes))


def breaks(classes, shape):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(shape[0], classes)

        def forward(self, x):
            raise RuntimeError("no forward today")

    return Broken()


def viewing(classes, shape):
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(shape[0], 4, 3), nn.Linear(4 * 36, classes)

        def forward(self, x):
            return self.head(self.conv(x).relu().view(-1, 4 * 36))

    return Viewing()


def no_module(classes, shape):
    return 3


def arrays():
    draw = np.random.default_rng(0)
    labels = np.arange(300) % 3
    return (draw.normal(size=(300, 4)) + labels[:, None]).astype(np.float32), labels


def evil(classes, shape):
    import pathlib
    pathlib.Path("called").touch()


class Dies(torch.nn.Linear):
    def forward(self, x):
        import multiprocessing, os
        if multiprocessing.parent_process() is not None and self.training:
            os.kill(os.getpid(), 9)
        return super().forward(x)


def dies(classes, shape):
    return Dies(shape[0], classes)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    (tmp_path / "own_for_tests.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_for_tests", raising=False)  # that of another test
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        'data = {source = "own_for_tests:arrays", server = 60}\n'
        'split = {kind = "iid", clients = 3}\nmodel = {name = "own_for_tests:model", width = 12}\n'
        "training = {rounds = 2, epochs = 1}\nsettings = {distill_epochs = 2}\n"
    )
    return load_recipe(recipe)


def test_a_recipe_can_name_a_user_s_model_and_data(own: Recipe, play: Play) -> None:
    with ProcessPool(1) as workers:
        folder = play("own", "fedbe", recipe=own, workers=workers)
    assert fedbe.load_model(folder)[1].out_features == 12
    source = Path("own_for_tests.py")
    source.write_text(source.read_text().replace("shape, width=8):", "shape, width=8):\n    width += 1"))
    del sys.modules["own_for_tests"]
    with pytest.raises(RunError, match=r"does not fit.*size mismatch"):
        fedbe.load_model(folder)


def test_a_model_that_does_not_take_channels_last_runs_and_says_so(own: Recipe, play: Play) -> None:
    """Clients in a worker, server step, evaluation, and the saved model."""
    images = type(own.data)(source="digits", server=60)
    viewing = own.model_copy(update={"model": type(own.model)(name="own_for_tests:viewing"), "data": images})
    with ProcessPool(1) as workers:
        folder = play("viewing", "fedbe", recipe=viewing, workers=workers)
    records = run_folder.read_rounds(folder)
    assert [record["server"]["memory_layout"] for record in records] == ["contiguous"] * 2
    test = data.load_task(run_folder.read_recipe(folder).data.source).test
    again = saved_model.load_trained_model(folder).metrics(test.inputs, test.labels)
    assert again.accuracy == records[-1]["test"]["accuracy"]


def test_a_model_that_always_fails_is_refused_before_the_first_round(own: Recipe, play: Play) -> None:
    broken = own.model_copy(update={"model": type(own.model)(name="own_for_tests:breaks")})
    with pytest.raises(SettingError, match="cannot run on the data: no forward today"):
        play("broken", "fedavg", recipe=broken, workers=Serial())


def test_a_fault_of_this_machine_stops_the_run_and_changes_no_result(own: Recipe, play: Play) -> None:
    dying = own.model_copy(update={"model": type(own.model)(name="own_for_tests:dies")})
    with ProcessPool(1) as workers:
        with pytest.raises(RunError, match=r"client \d could not be trained: .*3 times"):
            play("dying", "fedavg", recipe=dying, workers=workers)
        dropping = override_recipe(dying, ["limits.drop_lost_clients=true"])
        with pytest.raises(AggregationError, match="no client finished round 1"):
            play("dropping", "fedavg", recipe=dropping, workers=workers)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_for_tests:no_module", "must return a torch.nn.Module, got int"),
        ("own_for_tests:nothing", "must name a function as module:function, but module"),
        ("no_such_module:model", "must name a function .*no module named"),
    ],
)
def test_a_function_that_returns_no_model_is_refused(
    own: Recipe, name: str, sentence: str, play: Play, pool: ProcessPool
) -> None:
    other = own.model_copy(update={"model": type(own.model)(name=name)})
    with pytest.raises(RecipeError, match=sentence):
        play("none", "fedavg", recipe=other, workers=pool)


def test_a_method_that_distils_needs_server_images(play: Play, small: Recipe) -> None:
    bare = override_recipe(small, ["data.server=0"])
    with pytest.raises(RunError, match="FedBE needs unlabeled inputs"):
        play("bare", "fedbe", recipe=bare)
    measured = override_recipe(bare, ["evaluation.ensemble=S"])
    play("without BatchNorm", "fedavg", recipe=measured)
    with pytest.raises(RunError, match="FedAvg needs unlabeled inputs"):
        play(
            "with BatchNorm",
            "fedavg",
            recipe=measured.model_copy(update={"model": type(measured.model)(name="resnet20")}),
        )


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    for cut in ('{"round": 2, "te', "{", "{}"):
        (tmp_path / "rounds.jsonl").write_text(json.dumps({"round": 1}) + "\n" + cut)
        assert run_folder.read_rounds(tmp_path) == [{"round": 1}]


def test_a_last_line_whose_beginning_was_not_yet_on_the_disk_is_ignored(tmp_path: Path) -> None:
    whole = b'{"round": 1}\n'
    for torn in (b'\0\0\0\0\0\0 2, "test": {}}\n', b'{"round": 2, "se\0\0\0\0"}\n', b"\0" * 700):
        (tmp_path / "rounds.jsonl").write_bytes(whole + torn)
        assert run_folder.read_rounds(tmp_path) == [{"round": 1}]
    (tmp_path / "rounds.jsonl").write_bytes(whole + b"\0\0\0\n" + whole)
    with pytest.raises(RunError, match=r"line 2 of .* is damaged"):
        run_folder.read_rounds(tmp_path)


@pytest.mark.parametrize("line", [b"{oops", b"1", b"{}", b"\xff\xfe"])
def test_a_damaged_line_is_an_error(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"round": 1}\n' + line + b'\n{"round": 3}\n')
    with pytest.raises(RunError, match=r"line 2 of .* is damaged"):
        run_folder.read_rounds(tmp_path)


def test_a_damaged_line_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2, "seconds": {"round": null}}\n')
    with pytest.raises(RunError) as error:
        run_folder.read_rounds(tmp_path)
    assert str(error.value) == (
        f"line 2 of {tmp_path}/rounds.jsonl is damaged (`seconds.round` must be a finite number, got None): "
        "restore the file, or start a new run"
    )


INFO = {"method": "fedavg", "seed": 0, "precision": "float32", "made_with": {}, "created": "now"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"final": []}, "`final` must be a table"),
        ({"final": {"accuracy": 10**400}}, "`final.accuracy` must be a finite number"),
        ({"finished": 3}, "`finished` must be a text"),
        ({"finished": "now"}, "a finished run must have a final accuracy"),
        ({"seed": 10**400}, "`seed` must be a whole number of 64 bits"),
        ({"made_with": {"torch": None}}, "`made_with.torch` must be a text, got None"),
        ({"identity": {"data": 3}}, "`identity.data` must be a text, got 3"),
        ({"identity": "data"}, "`identity` must be a table, got 'data'"),
        ({"device": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_a_damaged_info_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**INFO, **changes}))
    if message is None:
        assert run_folder.read_info(tmp_path).method == "fedavg"
        return
    with pytest.raises(RunError, match=rf"run\.json cannot be read: .*{message}"):
        run_folder.read_info(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"round": 1, "test": 3}',
        '{"round": 1, "test": {"accuracy": "x"}}',
        '{"round": 1, "test": {"accuracy": null}}',
        '{"round": true}',
        '{"round": 1, "seconds": []}',
        '{"round": 1, "server": 3}',
        '{"round": 1, "set_aside": [4]}',
        '{"round": 1, "set_aside": [{"client": [], "reason": "x"}]}',
        '{"round": 1, "seconds": {"round": null}}',
        '{"round": 1, "memory_mb": {"train": NaN}}',
        '{"round": 1, "bytes": {"up": 1%s}}' % ("0" * 400),
        '{"round": 1, "test": {"accuracy": 1%s}}' % ("0" * 400),
        '{"round": 1, "test": {"ece": 1e308}}',
        '{"round": 1, "test": {"accuracy": NaN}}',
        '{"round": 1, "test_clients": {"client 0": 3}}',
        '{"round": 1, "server": {"gate": []}}',
        '{"round": 1, "server": {"gate": {"student": "x"}}}',
        '{"round": 1, "server": {"members": {"a": []}}}',
        '{"round": 1, "capped": [3]}',
        '{"round": 1, "lr": "\\ud800"}',
        "[" * 9999,
    ],
)
def test_a_line_that_no_report_can_use_is_an_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "rounds.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match=r"line 1 of .* is damaged"):
        run_folder.read_rounds(tmp_path)


def test_a_resumed_run_must_have_all_its_rounds(play: Play, pool: ProcessPool, silent: Any) -> None:
    folder = play("whole", "fedavg")
    (folder / "model.safetensors").unlink()
    assert not run_folder.is_done(folder)
    lines = (folder / "rounds.jsonl").read_bytes()
    (folder / "rounds.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match="finished rounds"):
        loop.execute(folder, pool, silent)
    (folder / "rounds.jsonl").write_bytes(lines)
    assert loop.execute(folder, pool, silent)  # a finished run whose model was lost writes it again
    assert run_folder.is_done(folder)
    assert (folder / "model.safetensors").exists()


def test_a_damaged_model_is_refused_with_advice_and_written_again(play: Play, pool: ProcessPool, silent: Any) -> None:
    folder = play("whole", "fedavg")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match=r"is damaged \(.*checksum\): `fedbe resume"):
        fedbe.load_model(folder)
    with pytest.warns(RunWarning, match="is damaged and is written again"):
        assert not run_folder.is_done(folder)
    assert loop.execute(folder, pool, silent)
    assert path.read_bytes() == content
    assert run_folder.is_done(folder)


def test_a_model_file_names_no_code(own: Recipe, play: Play, tmp_path: Path) -> None:
    with ProcessPool(1) as workers:
        folder = play("own", "fedavg", recipe=own, workers=workers)
    path = folder / "model.safetensors"
    header, tensors = read_tensors(path)
    assert header["model"]["name"] == ""
    evil = {**header, "model": {**header["model"], "name": "own_for_tests:evil"}}
    write_tensors(path, evil, tensors)
    assert fedbe.load_model(folder)[1].out_features == 12  # the recipe's function was called, not that of the file
    (folder / "recipe.toml").unlink()
    with pytest.raises(RunError, match=r"recipe\.toml is missing"):
        fedbe.load_model(folder)
    assert not (tmp_path / "called").exists()


def test_records_without_checkpoints_are_not_overwritten(
    play: Play, small: Recipe, pool: ProcessPool, silent: Any
) -> None:
    folder = play("records", "fedavg", recipe=override_recipe(small, ["training.rounds=3"]))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"finished": None}))
    with (
        pytest.raises(RunError, match="last checkpoint is of round 0"),
        run_folder.discard_on_error(folder),
    ):
        loop.execute(folder, pool, silent)
    assert len(run_folder.read_rounds(folder)) == 3


def test_a_run_folder_is_created_atomically(tmp_path: Path, small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    assert run_folder.create(tmp_path / "empty", small, "fedavg", 0, "float32")
    monkeypatch.setattr(run_folder, "write_json", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_folder.create(tmp_path / "half", small, "fedavg", 0, "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        run_folder.create(tmp_path / "file", small, "fedavg", 0, "float32")


def test_the_environment_is_not_changed(play: Play) -> None:
    before = np.random.default_rng(0).bit_generator.state, torch.random.get_rng_state(), dict(os.environ)
    play("clean", "fedbe")
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert dict(os.environ) == before[2]


def test_the_measured_ensemble_follows_the_recipe_with_any_method() -> None:
    recipe = load_recipe("swissroll", ["settings.num_samples=7"])
    for name in ("fedavg", "fedbe"):
        sim = Simulation(recipe, recipe.method_for(name), 0, None, None, None)  # type: ignore[arg-type]
        settings = sim.ensemble(members="S")
        assert (settings.posterior, settings.num_samples, settings.members) == ("dirichlet", 7, "S")
    released = load_recipe("digits", ["variant=released"])
    for name in ("fedavg", "fedbe"):
        sim = Simulation(released, released.method_for(name), 0, None, None, None)  # type: ignore[arg-type]
        assert (sim.ensemble().posterior, sim.ensemble().statistics) == ("gaussian-released", "sampled")


def test_an_edited_user_model_is_refused(tmp_path: Path, own: Recipe, silent: Any) -> None:
    folder = run_folder.create(tmp_path / "own", own, "fedavg", 0, "float32")
    with ProcessPool(1) as workers:
        assert not loop.execute(folder, workers, silent, should_stop=silent.rounds_ended(1))
        source = tmp_path / "own_for_tests.py"
        source.write_text(source.read_text().replace("ReLU", "Tanh"))
        with pytest.raises(RunError, match="its model was"):
            loop.execute(folder, workers, silent)


def test_run_json_notes_what_changed_at_a_resume(
    tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder.create(tmp_path / "moved", small, "fedavg", 0, "float32")
    began = run_folder.read_info(folder).made_with
    assert not loop.execute(folder, pool, silent, should_stop=silent.rounds_ended(1))
    assert not loop.execute(folder, pool, silent, should_stop=lambda: True)
    assert run_folder.read_info(folder).made_with == began  # resumed where it was begun: nothing to say
    monkeypatch.setattr(provenance, "made_with", lambda _device: began | {"machine": "another one"})
    assert not loop.execute(folder, pool, silent, should_stop=silent.rounds_ended(1))
    assert loop.execute(folder, pool, silent)
    moved = f"{began['machine']}, from round 2 on another one"
    assert run_folder.read_info(folder).made_with == began | {"machine": moved}
    (folder / "model.safetensors").unlink()  # a resume that only writes the model again runs no round
    monkeypatch.setattr(provenance, "made_with", lambda _device: began | {"machine": "a third"})
    assert loop.execute(folder, pool, silent)
    assert run_folder.read_info(folder).made_with["machine"] == moved


def test_the_server_declares_the_sizes_of_the_split_unless_the_recipe_says_otherwise(small: Recipe, play: Play) -> None:
    """Clients with 240, 67 and 831 digits; of three, one may count for 60 %."""
    uneven = ["split.kind=dirichlet", "split.alpha=0.1", "split.clients=3", "training.rounds=1"]
    declared = override_recipe(small, [*uneven, "training.clients_per_round="])
    (honest,) = run_folder.read_rounds(play("declared", "fedavg", recipe=declared))
    assert "capped" not in honest
    reported = override_recipe(declared, ["limits.client_weights=reported"])
    (line,) = run_folder.read_rounds(play("reported", "fedavg", recipe=reported))
    (capped,) = line["capped"]
    assert "client 2 reports 73 %" in capped
    assert "counts as 60 %" in capped
