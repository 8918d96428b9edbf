"""The code in docs/methods.md does what the text says, and the map in CONTRIBUTING.md is the tree."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fedbe
from fedbe.algorithms.methods import Method
from fedbe.algorithms.server.stages import Mean
from fedbe.algorithms.vote import VOTE_RULES
from fedbe.posterior.registry import POSTERIORS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
QUICK = {"variant": "paper", "distill_epochs": 1, "distill_batch_size": 8}


@pytest.fixture
def example(monkeypatch):
    """example(heading): the names that the code below a heading defines. Registries are restored after the test."""

    def run(heading):
        for registry, name in ((POSTERIORS, "bootstrap"), (VOTE_RULES, "median")):
            monkeypatch.setitem(registry, name, None)
            monkeypatch.delitem(registry, name)
        section = EXAMPLES.partition(f"\n## {heading}")[2].partition("\n## ")[0]
        block = re.search(r"```python\n(.*?)```", section, re.S)
        assert block, f"there is no code below '{heading}'"
        names = {"__name__": "methods"}
        exec(compile(block[1], "methods.md", "exec"), names)  # noqa: S102
        return SimpleNamespace(**names)

    return run


def test_a_new_method(example, network, replies):
    module = network("mlp")
    given, updates = module.state_dict(), replies(module)
    average = fedbe.FedAvg(module).aggregate(given, updates)
    row = example("A method").row
    damped = fedbe.Server(row, module, rate=0.25).aggregate(given, updates)
    for name, start in given.items():
        torch.testing.assert_close(damped[name], start + 0.25 * (average[name] - start))
    with pytest.raises(fedbe.SettingError, match="rate"):
        row.with_settings({"rate": 2.0})


def test_a_new_transform(example, network, replies, same):
    module = network("mlp")
    transform = example("A transform").AddNoise
    states = []
    for noise_std in (0.0, 0.5):
        method = Method("noisy", "Noisy", "", stages=(Mean(),), transforms=(transform(noise_std),))
        states.append(fedbe.Server(method, module).aggregate(module.state_dict(), replies(module)))
    assert same(states[0], fedbe.FedAvg(module).aggregate(module.state_dict(), replies(module)))
    assert not same(*states)


def test_a_new_posterior(example, network, inputs_for, replies):
    example("A posterior")
    module = network("mlp")
    server = fedbe.FedBE(module, unlabeled=inputs_for("mlp"), posterior="bootstrap", num_samples=4, **QUICK)
    server.aggregate(module.state_dict(), replies(module))
    assert [m.name for m in server.info.step.members][:5] == [*(f"sample {i}" for i in range(1, 5)), "average"]


def test_a_new_vote_rule(example, network, inputs_for, replies):
    rule = example("A vote rule").median_vote
    votes = [torch.tensor([[0.2, 0.8]]), torch.tensor([[0.4, 0.6]]), torch.tensor([[1.0, 0.0]])]
    torch.testing.assert_close(rule(votes), torch.tensor([[0.4, 0.6]]))
    module = network("mlp")
    server = fedbe.FedBE(module, unlabeled=inputs_for("mlp"), vote="median", **QUICK)
    assert server.aggregate(module.state_dict(), replies(module))


def test_every_path_in_the_answers_exists():
    answers = TEXT.partition("\n## Where would it go?")[2].partition("\n## ")[0]
    paths = re.findall(r"`([a-z_/]+(?:\.py|/))`", answers)
    assert len(paths) >= 12
    assert [path for path in paths if not (ROOT / "src/fedbe" / path).exists()] == []


def test_the_map_is_the_tree():
    chart = TEXT.partition("src/fedbe/\n")[2].partition("    tests/")[0]
    names = set(re.findall(r"[a-z_0-9]+", chart))
    paths = [path for path in (ROOT / "src/fedbe").rglob("*.py") if not path.name.startswith("_")]
    modules = {path.stem for path in paths}
    packages = {path.parent.name for path in paths}
    assert (modules | packages) - names == set(), "these are not in the map of CONTRIBUTING.md"
    named = set(re.findall(r"\b([a-z_0-9]+)\.py\b", chart)) - {"__init__"}
    assert named - modules == set(), "the map of CONTRIBUTING.md has these, but the tree does not"
