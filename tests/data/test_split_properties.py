"""Properties that every split has, for any labels, settings and seed."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedbe.core.random import generator
from fedbe.data import split
from fedbe.data.splits import stratified
from fedbe.errors import DataError

SEEDS = st.integers(-(2**63), 2**63)
# One count for each class; a class may be missing.
LABELS = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(
    lambda counts: torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
)
ALPHAS = st.one_of(st.floats(0.5, 10), st.floats(0, exclude_min=True, allow_infinity=False))
OPTIONS = {
    "iid": st.just({}),
    "step": st.one_of(
        st.fixed_dictionaries({"minor_images": st.just(0)}),
        st.fixed_dictionaries({"major_share": st.floats(0, 1, exclude_min=True)}),
    ),
    "dirichlet": st.fixed_dictionaries({"alpha": ALPHAS}),
    "column": st.just({}),
}


@pytest.mark.parametrize("kind", OPTIONS)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), labels=LABELS, seed=SEEDS)
def test_every_image_goes_to_one_owner_and_sizes_are_as_asked(kind, data, labels, seed):
    assume(len(labels))
    clients = data.draw(st.integers(1, min(8, len(labels))), "clients")
    server = data.draw(st.integers(0, len(labels) - clients), "server")
    options = data.draw(OPTIONS[kind], "options")
    if kind == "step":
        options["major_classes"] = data.draw(st.integers(1, int(labels.max()) + 1), "major_classes")
    if kind == "column":
        options["ids"] = torch.arange(len(labels)) % clients
    try:
        partition = split(kind, labels, clients=clients, server=server, seed=seed, **options)
    except DataError:  # a client without images; all other settings are in range
        assert kind != "iid"
        return
    parts = [partition.server, *partition.clients]
    assert len(partition.server) == server
    assert len(partition.clients) == clients
    assert all(len(index) for index in partition.clients)
    assert all(torch.equal(index, index.sort().values) for index in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels)))


@settings(max_examples=80, deadline=None)
@given(LABELS, st.floats(0, 1), SEEDS)
def test_a_stratified_part_is_within_one_image_of_proportional(labels, share, seed):
    assume(len(labels))
    size = round(share * len(labels))
    chosen = stratified(labels, size, generator(seed))
    assert len(chosen.unique()) == len(chosen) == size
    counts, total = (torch.bincount(values, minlength=6) for values in (labels[chosen], labels))
    assert ((counts - total * size / len(labels)).abs() < 1).all()
