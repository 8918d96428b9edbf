"""What many tests share: small states, small networks, clients around a global model."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from fedbe import ClientUpdate, ModelState
from fedbe.updates import Update

State = dict[str, Tensor]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The tensors are small and xdist owns the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture
def state() -> Callable[..., ModelState]:
    """state([[a, b], [c, d]], buffers=[…]): a packed state with these numbers."""

    def make(params: object, buffers: object = (), dtype: torch.dtype = torch.float32) -> ModelState:
        return ModelState(
            torch.as_tensor(params, dtype=dtype).reshape(-1), torch.as_tensor(buffers, dtype=dtype).reshape(-1), {}
        )

    return make


@pytest.fixture
def update(state: Callable[..., ModelState]) -> Callable[..., Update]:
    """update(client, params, examples): what the guard would let in."""

    def make(client: int | str, params: object, examples: float = 1.0, **extras: Tensor) -> Update:
        return Update(client, state(params), float(examples), extras)

    return make


def _mlp_bn() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _mlp_plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _conv_gn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 3)
    )


def _dense() -> nn.Module:
    """Logits [N, classes, H, W], as for segmentation."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1))


def _dropout_bn() -> nn.Module:
    """Dropout before BatchNorm: whatever draws masks out of turn shows in the running statistics."""
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


_NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp-bn": (_mlp_bn, (4,)),
    "mlp": (_mlp_plain, (4,)),
    "conv-gn": (_conv_gn, (3, 8, 8)),
    "dense": (_dense, (3, 6, 6)),
    "dropout-bn": (_dropout_bn, (4,)),
}


@pytest.fixture
def network() -> Callable[[str], nn.Module]:
    """network("mlp-bn"): one of the small networks, always with the same weights."""

    def make(name: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            return _NETWORKS[name][0]()

    return make


@pytest.fixture
def inputs_for() -> Callable[..., Tensor]:
    """inputs_for("mlp-bn", 24): random inputs that fit a network."""

    def make(name: str, count: int = 24, seed: int = 11) -> Tensor:
        return torch.randn(count, *_NETWORKS[name][1], generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def nearby() -> Callable[..., list[State]]:
    """nearby(module, 3): valid states around a module's own, each another one; counters grow."""

    def make(module: nn.Module, count: int = 3, spread: float = 0.1, seed: int = 5) -> list[State]:
        draw = torch.Generator().manual_seed(seed)
        found: list[State] = []
        for i in range(count):
            moved: State = {}
            for name, tensor in module.state_dict().items():
                if not tensor.is_floating_point():
                    moved[name] = tensor + i
                    continue
                noise = torch.randn(tensor.shape, generator=draw) * spread
                moved[name] = tensor + noise.to(tensor.dtype)
                if "running_var" in name:
                    moved[name].clamp_(min=1e-2)
            found.append(moved)
        return found

    return make


@pytest.fixture
def replies(nearby: Callable[..., list[State]]) -> Callable[..., list[ClientUpdate]]:
    """replies(module): three clients with 10, 20 and 40 examples and SCAFFOLD's control variates."""

    def make(module: nn.Module, ids: Sequence[int | str | None] = (0, 1, 2)) -> list[ClientUpdate]:
        size = sum(p.numel() for p in module.parameters())
        draw = torch.Generator().manual_seed(17)
        return [
            ClientUpdate(s, 10 * 2**i, client=c, extras={"control": torch.randn(size, generator=draw)})
            for i, (s, c) in enumerate(zip(nearby(module, len(ids)), ids, strict=True))
        ]

    return make


@pytest.fixture
def same() -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], bool]:
    """Are two named states equal to the bit?"""

    def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
        return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)

    return compare
