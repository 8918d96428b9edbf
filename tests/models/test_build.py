import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedbe.core.random import generator
from fedbe.errors import SettingError
from fedbe.models import MODELS, build


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet20", 269_722),
        ("resnet32", 464_154),
        ("resnet44", 658_586),
        ("resnet56", 853_018),
        ("convnet", 122_570),
        ("mobilenetv2", 2_236_682),
    ],
)
def test_number_of_parameters_matches_the_literature(name, count):
    assert _size(build(name, 10, (3, 32, 32), generator(0))) == count


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", ["resnet20", "mobilenetv2"])
def test_both_norms_have_the_same_parameters_and_only_batch_norm_has_buffers(name, norm):
    module = build(name, 10, (3, 32, 32), generator(0), norm=norm)
    assert _size(module) == _size(build(name, 10, (3, 32, 32), generator(0)))
    assert bool(list(module.buffers())) == (norm == "batch")
    other = nn.GroupNorm if norm == "batch" else nn.BatchNorm2d
    assert not any(isinstance(m, other) for m in module.modules())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", [32, 64])
def test_small_and_larger_images(name, side):
    module = build(name, 7, (3, side, side), generator(0)).eval()
    with torch.no_grad():
        logits = module(torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 7)
    assert bool(torch.isfinite(logits).all())
    assert float(logits.std()) > 0


@pytest.mark.parametrize(
    ("name", "side", "last"),
    [("mobilenetv2", 32, 4), ("mobilenetv2", 64, 4), ("mobilenetv2", 128, 4), ("resnet20", 32, 8)],
)
def test_size_before_the_pooling(name, side, last):
    module = build(name, 10, (3, side, side), generator(0)).eval()
    seen = []
    pool = next(m for m in module.modules() if isinstance(m, nn.AdaptiveAvgPool2d))
    pool.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[-1]))
    with torch.no_grad():
        module(torch.zeros(1, 3, side, side))
    assert seen == [last]


def test_relu_after_pooling_equals_relu_before_it():
    """The reference is the network of the paper's text, layer by layer."""
    module = build("convnet", 10, (3, 32, 32), generator(3)).eval()
    convs = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    dense = [m for m in module.modules() if isinstance(m, nn.Linear)]
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = functional.max_pool2d(functional.relu(convs[0](x)), 2)
        y = functional.max_pool2d(functional.relu(convs[1](y)), 2)
        y = functional.relu(convs[2](y)).flatten(1)
        y = dense[1](functional.relu(dense[0](y)))
        torch.testing.assert_close(module(x.clone()), y)
    assert [tuple(c.weight.shape[:2]) for c in convs] == [(32, 3), (64, 32), (64, 64)]


@pytest.mark.parametrize("extra", [1, 3])
def test_the_depth_study_adds_padded_convolutions(extra):
    deeper = build("convnet", 10, (3, 32, 32), generator(0), extra_layers=extra)
    assert _size(deeper) == 122_570 + extra * (64 * 64 * 9 + 64)
    assert deeper(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_a_smaller_padded_convnet_takes_smaller_images():
    # 24·27+24, 48·24·9+48, 48·48·9+48; 4×4 positions of 48 channels are left: 768·64+64, 64·10+10
    small = build("convnet", 10, (3, 16, 16), generator(0), widths=(24, 48, 48), padding=1)
    assert _size(small) == 672 + 10_416 + 20_784 + 49_216 + 650
    assert small(torch.zeros(1, 3, 16, 16)).shape == (1, 10)


def test_resnet_shortcuts_have_no_parameters_and_pad_the_channels():
    module = build("resnet20", 10, (3, 32, 32), generator(0))
    block = next(m for m in module.modules() if getattr(m, "grown", 0) == 16)
    for p in block.parameters():
        nn.init.zeros_(p)  # the residual branch gives 0
    x = torch.rand(1, 16, 8, 8) + 0.1
    with torch.no_grad():
        out = block.eval()(x)
    torch.testing.assert_close(out[:, :16], x[:, :, ::2, ::2])
    assert not out[:, 16:].any()


def test_mlp_has_the_requested_widths():
    module = build("mlp", 3, (2,), generator(0), hidden=(16, 8))
    assert [tuple(m.weight.shape) for m in module.modules() if isinstance(m, nn.Linear)] == [(16, 2), (8, 16), (3, 8)]
    assert module(torch.zeros(5, 2)).shape == (5, 3)
    assert build("mlp", 3, (1, 8, 8), generator(0))(torch.zeros(5, 1, 8, 8)).shape == (5, 3)


@pytest.mark.parametrize("name", ["mlp", "convnet", "resnet20", "mobilenetv2"])
def test_weights_depend_on_the_generator_only(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build(name, 10, (3, 32, 32), generator(0)).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    two = build(name, 10, (3, 32, 32), generator(0)).state_dict()
    other = build(name, 10, (3, 32, 32), generator(1)).state_dict()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", ["mlp", "convnet", "resnet20", "mobilenetv2"])
def test_weights_are_xavier_uniform_and_biases_zero(name):
    module = build(name, 10, (3, 32, 32), generator(0))
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(layer.weight)
            bound = math.sqrt(6 / (fan_in + fan_out))
            largest = float(layer.weight.detach().abs().max())
            assert 0.8 * bound < largest <= bound
            assert layer.bias is None or not layer.bias.any()
        elif isinstance(layer, nn.BatchNorm2d):
            assert bool((layer.weight == 1).all())
            assert not layer.bias.any()


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("resnet20x", 10, (3, 32, 32)), {}, "did you mean 'resnet20'"),
        (("convnet", 1, (3, 32, 32)), {}, "`classes` must be >= 2, got 1"),
        (("convnet", 10, (3, 8, 8)), {}, "ConvNet needs images"),
        (("convnet", 10, (2,)), {}, "ConvNet needs images"),
        (("resnet20", 10, (3, 4, 4)), {}, "at least 8 x 8"),
        (("mobilenetv2", 10, (3, 8, 8)), {}, "at least 16 x 16"),
        (("resnet20", 10, (3, 32, 32)), {"norm": "grp"}, "did you mean 'group'"),
        (("resnet20", 10, (3, 32, 32)), {"norms": "group"}, "did you mean 'norm'"),
        (("convnet", 10, (3, 32, 32)), {"extra_layers": -1}, r"`extra_layers` must be in \[0, 100\], got -1"),
        (("convnet", 10, (3, 32, 32)), {"extra_layers": 20_000}, r"`extra_layers` must be in \[0, 100\], got 20000"),
        (("convnet", 10, (3, 32, 32)), {"widths": [8, 8]}, "`widths` must be three numbers"),
        (("convnet", 10, (3, 32, 32)), {"padding": 2}, "`padding` 0 or 1"),
        (("mlp", 10, (2,)), {"hidden": (0,)}, "`hidden` must be widths >= 1"),
        (("mlp", 10, (2,)), {"hidden": 5}, "cannot be made with hidden = 5"),
        (("mlp", 10, (2,)), {"hidden": [10**30]}, r"cannot be made with hidden = \[10{30}\]: [^\n]*$"),
        (("mlp", 10, (2,)), {"hidden": [2**62]}, r"cannot be made with hidden = .*overflow"),
        (("convnet", 10, (3, 32, 32)), {"extra_layers": "2"}, "cannot be made with extra_layers"),
    ],
)
def test_errors(arguments, settings, message):
    with pytest.raises(SettingError, match=message):
        build(*arguments, generator(0), **settings)


@pytest.mark.parametrize("depth", [7, 21, 2])
def test_wrong_resnet_depths_are_errors(depth):
    from fedbe.models.resnet import ResNet

    with pytest.raises(SettingError, match=r"`depth` must be 6n \+ 2"):
        ResNet(depth, 10, (3, 32, 32))
