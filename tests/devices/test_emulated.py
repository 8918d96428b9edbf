"""The emulated device is as strict as CUDA: otherwise the other tests here would prove nothing."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedbe import ModelRunner, Plan


def test_it_trains_with_the_numbers_of_the_cpu():
    def trained(device):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)
            module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
            inputs, labels = torch.randn(5, 3, 8, 8).to(device), torch.tensor([0, 1, 2, 0, 1]).to(device)
        module = module.to(device)
        for _ in range(2):
            functional.cross_entropy(module(inputs), labels).backward()
            for parameter in module.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.1)
        return {name: tensor.cpu() for name, tensor in module.state_dict().items()}

    there, here = trained("emu"), trained("cpu")
    assert all(torch.equal(there[name], here[name]) for name in here)


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: here.add_(there),
        lambda there, here: there.index_select(0, here.long()),
        lambda there, here: here[there.long()],
        lambda there, here: torch.stack([there, here]),
        lambda there, here: here + there.sum(),
        lambda there, here: there + here.to("emu:1"),
    ],
)
def test_it_refuses_two_devices(mix):
    with pytest.raises(RuntimeError, match=r"device|expected all tensors"):
        mix(torch.ones(3).to("emu"), torch.ones(3))


def test_single_numbers_and_indices_of_the_host_are_fine_as_on_cuda(emulator):
    there = torch.arange(3.0).to("emu")
    with emulator.counted() as counts:
        assert (there + torch.tensor(2.0)).device.type == "emu"
        assert there[torch.tensor([2, 0])].cpu().tolist() == [2.0, 0.0]
    assert (counts.to_device, counts.from_device, counts.waits) == (1, 1, 1)


def test_it_counts_copies_and_waits(emulator):
    with emulator.counted() as counts:
        there = torch.ones(3).to("emu")
        assert counts.to_device == 1
        torch.zeros(3, device="emu").add_(there).mul_(2)
        assert (counts.to_device, counts.stops) == (1, 0)
        assert float(there.sum()) == 3.0
        assert bool((there > 0).all())
        there.cpu()
        torch.zeros(3).copy_(there)
    assert (counts.to_device, counts.from_device, counts.waits) == (1, 2, 2)


def test_masks_are_waits_as_on_cuda(emulator):
    there = torch.arange(4.0).to("emu")
    with emulator.counted() as counts:
        assert len(there[there > 1]) == 2  # the host needs the size
        there[there > 1] = there[:2].clone()
        assert counts.waits == 2
        there[there > 1] = 0.0  # a plain fill
        torch.where(there > 1, there, 0.0)
    assert (counts.to_device, counts.waits) == (0, 2)


def test_a_model_travels_in_few_copies(emulator):
    """Its parameters, its buffers and its counters are one copy each, however many layers it has."""
    layers = [nn.Linear(2, 2), *(nn.BatchNorm1d(2) for _ in range(9))]
    runner = ModelRunner(nn.Sequential(*layers), Plan(device="emu"))
    state = runner.read()
    counted = replace(state, counters={name: torch.tensor(i) for i, name in enumerate(state.counters)})
    with emulator.counted() as counts:
        runner.load(counted)
        assert (counts.to_device, counts.from_device) == (3, 0)
        back = runner.read()
    assert (counts.to_device, counts.from_device, counts.waits) == (3, 3, 0)
    assert {name: int(t) for name, t in back.counters.items()} == {n: i for i, n in enumerate(state.counters)}
    assert len({t.untyped_storage().data_ptr() for t in back.counters.values()}) == 9


def test_it_has_its_own_random_numbers():
    torch.emu.manual_seed(4)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    there = torch.rand(3, device="emu")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(there.cpu(), torch.rand(3, generator=torch.Generator().manual_seed(5)))  # seeds all devices
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="emu", generator=torch.Generator())


def test_it_runs_out_of_memory(emulator):
    emulator.memory_ends_in = 1
    there = torch.ones(3).to("emu")
    with pytest.raises(torch.OutOfMemoryError):
        there + 1
