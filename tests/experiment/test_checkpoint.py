"""Checkpoints are complete, the last two are kept, and another identity is refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedbe.algorithms.vote import Member
from fedbe.core.files import write_atomic
from fedbe.core.state import ModelState
from fedbe.errors import RunError, RunWarning
from fedbe.experiment import checkpoint, loop, provenance, run_folder
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.run_state import RunState
from fedbe.experiment.tensor_files import UNREADABLE, read_tensors


def _state(round: int, value: float = 1.0) -> RunState:
    model = ModelState(torch.tensor([value, 2.0]), torch.tensor([3.0]), {"bn.num_batches_tracked": torch.tensor(4)})
    return RunState(
        round,
        model,
        {"momentum": torch.tensor([5.0, 6.0])},
        {7: {"control": torch.tensor([8.0, 9.0])}},
        (Member("client 0", model),),
    )


def test_load_returns_the_whole_saved_state(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, _state(3), {"seed": "0"})
    back = checkpoint.latest(tmp_path, {"seed": "0"})
    assert back is not None
    assert back.round == 3
    assert back.model.params.tolist() == [1.0, 2.0]
    assert back.model.buffers.tolist() == [3.0]
    assert back.model.counters["bn.num_batches_tracked"].item() == 4
    assert back.model.counters["bn.num_batches_tracked"].dtype == torch.int64
    assert back.memory["momentum"].tolist() == [5.0, 6.0]
    assert back.clients[7]["control"].tolist() == [8.0, 9.0]
    assert [m.name for m in back.members] == ["client 0"]
    assert back.members[0].state.params.tolist() == [1.0, 2.0]


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for number in range(1, 5):
        checkpoint.save(tmp_path, _state(number), {})
    assert [p.name for p in checkpoint.paths(tmp_path)] == [
        "checkpoint-000004.safetensors",
        "checkpoint-000003.safetensors",
    ]


@pytest.mark.parametrize("target", ["folder", "file", "nothing"])
def test_a_new_run_is_not_written_through_a_link(target: str, tmp_path: Path, small: Recipe) -> None:
    victim = tmp_path / "victim"
    if target == "folder":
        victim.mkdir()
        (victim / "recipe.toml").write_text("mine")
    elif target == "file":
        victim.write_text("mine")
    (tmp_path / ".run.part").symlink_to(victim)
    folder = run_folder.create(tmp_path / "run", small, "fedavg", 0, "float32")
    assert not folder.is_symlink()
    assert not (tmp_path / ".run.part").is_symlink()
    if target != "nothing":
        assert (victim / "recipe.toml" if target == "folder" else victim).read_text() == "mine"


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _with_header(content: bytes, old: bytes, new: bytes) -> bytes:
    """The file with another text of the same length in its header."""
    assert len(old) == len(new)
    assert old in content
    return content.replace(old, new)


DAMAGE = {
    "name of the checksum, and the last byte flipped": lambda b: _flipped(
        _with_header(b, b"sha256", b"sha25>"), len(b) - 1
    ),
    "half": lambda b: b[: len(b) // 2],
    "nothing": lambda _: b"",
    "ones": lambda b: b"\xff" * len(b),
    "last byte flipped": lambda b: _flipped(b, len(b) - 1),
    "a number flipped": lambda b: _flipped(b, len(b) - 30),
    "data zeroed": lambda b: b[:-40] + bytes(40),
    "another round": lambda b: _with_header(b, b'round\\": 2', b'round\\": 1'),
    "no identity": lambda b: _with_header(b, b"identity", b"idontity"),
    "a list of members": lambda b: _with_header(b, b'members\\": [', b'memberz\\": ['),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path: Path, damage: str) -> None:
    checkpoint.save(tmp_path, _state(1), {"seed": "0"})
    last = checkpoint.save(tmp_path, _state(2), {"seed": "0"})
    last.write_bytes(DAMAGE[damage](last.read_bytes()))
    with pytest.warns(RunWarning, match=r"checkpoint-000002\.safetensors is damaged and not used"):
        back = checkpoint.latest(tmp_path, {"seed": "0"})
    assert back is not None
    assert back.round == 1


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Bits of the header may be padding or names; then the state is the same. Otherwise the file is refused."""
    content = checkpoint.save(tmp_path, _state(1), {"seed": "0"}).read_bytes()
    other = tmp_path / "checkpoint-000001.safetensors"
    for at in range(0, len(content), 3):
        other.write_bytes(_flipped(content, at))
        with suppress(*UNREADABLE):
            state = checkpoint.read(other)
            assert state.model.params.tolist() == [1.0, 2.0]
            assert state.clients[7]["control"].tolist() == [8.0, 9.0]
            assert state.round == 1


def test_a_file_without_a_checksum_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, _state(1), {"seed": "0"})
    header, tensors = read_tensors(path)
    path.write_bytes(safetensors.torch.save(tensors, {"fedbe": json.dumps(header)}))
    with pytest.raises(ValueError, match="it has no checksum"):
        checkpoint.read(path, {"seed": "0"})


def test_the_newest_is_kept_whatever_the_number_of_digits(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-old.safetensors").write_text("not one of ours")
    for number in (999_998, 999_999, 1_000_000):
        checkpoint.save(tmp_path, _state(number), {})
    assert [p.name for p in checkpoint.paths(tmp_path)] == [
        "checkpoint-1000000.safetensors",
        "checkpoint-999999.safetensors",
    ]
    back = checkpoint.latest(tmp_path)
    assert back is not None
    assert back.round == 1_000_000


def test_no_readable_checkpoint_is_an_error(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, _state(1), {}).write_bytes(b"nothing")
    with pytest.warns(RunWarning, match="damaged"), pytest.raises(RunError, match="none of the 1 checkpoints"):
        checkpoint.latest(tmp_path)
    assert checkpoint.latest(tmp_path / "elsewhere") is None


def test_another_identity_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, _state(1), {"recipe": "a", "data": "b"})
    with pytest.raises(RunError, match="data was b and is now c"):
        checkpoint.latest(tmp_path, {"recipe": "a", "data": "c"})


def test_another_build_of_torch_resumes(tmp_path: Path) -> None:
    """A machine with a GPU has another wheel. Checkpoints of earlier versions name the build."""
    checkpoint.save(tmp_path, _state(1), {"torch": "2.13.0+cpu"})
    assert checkpoint.latest(tmp_path, {"torch": "2.13.0"}) is not None
    with pytest.raises(RunError, match=r"torch was 2.13.0 and is now 2.14.0"):
        checkpoint.latest(tmp_path, {"torch": "2.14.0"})


def test_the_identity_of_a_run_does_not_name_the_build_of_torch(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, identities = prepare(small, 0), []
    for version in ("2.13.0+cpu", "2.13.0+cu130"):
        monkeypatch.setattr(torch, "__version__", version)
        identities.append(provenance.identity(small, "fedbe", 0, "float32", federation))
        assert provenance.made_with("cpu")["torch"] == version
    assert identities[0] == identities[1]


def test_other_numerics_are_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, _state(1), {"recipe": "a", "numerics": "1"})
    with pytest.raises(RunError, match="numerics was 1 and is now 2"):
        checkpoint.latest(tmp_path, {"recipe": "a", "numerics": "2"})


def test_a_checkpoint_from_before_the_numerics_version_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, _state(1), {"recipe": "a", "code": "0.1.0+abc"})
    with pytest.raises(RunError, match="numerics was unknown"):
        checkpoint.latest(tmp_path, {"recipe": "a", "numerics": "1"})
    assert checkpoint.latest(tmp_path) is not None  # it can still be read


def test_an_edited_recipe_is_refused_and_checkpoints_stay(
    tmp_path: Path, small: Recipe, pool: ProcessPool, silent: Any
) -> None:
    folder = run_folder.create(tmp_path / "edited", small, "fedavg", 0, "float32")
    assert not loop.execute(folder, pool, silent, should_stop=silent.rounds_ended(1))
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("\nlr = ", "\nlr = 1"))
    before = [p.read_bytes() for p in checkpoint.paths(folder)]
    with pytest.raises(RunError, match="its recipe was"):
        loop.execute(folder, pool, silent)
    assert [p.read_bytes() for p in checkpoint.paths(folder)] == before


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")
    with pytest.raises(RunError, match="cannot write"):
        write_atomic(tmp_path / "no" / "folder", b"new")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
