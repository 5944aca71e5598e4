# SPDX-License-Identifier: Apache-2.0
"""The networks of examples/model: their size, their gradients, and that a few steps lower the loss."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from singa_lite import device, layer, opt, tensor

FOLDER = Path(__file__).parents[1] / "examples" / "model"


def load(name):
    """A class of a file of examples/model, "file.Class"."""
    file, _, attribute = name.partition(".")
    spec = importlib.util.spec_from_file_location(f"example_{file}", FOLDER / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, attribute)


# name -> (shape of a small batch, parameters, learning rate), the parameters by hand:
# a convolution without bias has in * out * k * k, a batch norm 2 * channels, a linear layer (in + 1) * out
MODELS = {
    "cnn.CNN": ((8, 1, 28, 28), 26 * 20 + 501 * 50 + 801 * 500 + 501 * 10, 0.01),
    "mlp.MLP": ((8, 784), 785 * 512 + 513 * 512 + 513 * 10, 0.02),
    "resnet.ResNet20": (
        (8, 3, 32, 32),
        (27 * 16 + 32)
        + (6 * (144 * 16 + 32))
        + (144 * 32 + 288 * 32 * 5 + 6 * 64 + 16 * 32 + 64)
        + (288 * 64 + 576 * 64 * 5 + 6 * 128 + 32 * 64 + 128)
        + 65 * 10,
        0.05,
    ),
    "resnet.ResNet18": (
        (4, 3, 32, 32),
        (27 * 64 + 128)
        + 4 * (576 * 64 + 128)
        + sum(9 * half * 2 * half + 3 * 36 * half * half + 16 * half + 2 * half * half + 4 * half
              for half in (64, 128, 256))
        + 513 * 10,
        0.01,
    ),
    "resnet.ResNet50": (
        (2, 3, 64, 64),
        (147 * 64 + 128)
        + sum(
            # first block, the shortcut, the other blocks; a bottleneck's 1x1, 3x3 and 1x1 convolutions and their norms
            (inputs * width + 13 * width * width + 12 * width)
            + (inputs * 4 * width + 8 * width)
            + (blocks - 1) * (17 * width * width + 12 * width)
            for inputs, width, blocks in ((64, 64, 3), (256, 128, 4), (512, 256, 6), (1024, 512, 3))
        )
        + 2049 * 1000,
        0.01,
    ),
}  # fmt: skip
PUBLISHED = {
    "resnet.ResNet50": 25_557_032,
    "resnet.ResNet20": 272_474,
    "resnet.ResNet18": 11_173_962,
    "mlp.MLP": 669_706,
    "cnn.CNN": 431_080,
}


# the deep ones with one narrow block a stage: (shape, arguments of ResNet, learning rate)
SMALL = {
    "one basic block a stage": ((4, 3, 32, 32), {"stages": (8, 16, 32, 64), "num_blocks": 1}, 0.05),
    "one bottleneck a stage": (
        (4, 3, 64, 64),
        {"stages": (8, 16, 16, 32), "num_blocks": (1, 1, 1, 1), "is_deep": True},
        0.05,
    ),
}
DEEP = {"resnet.ResNet18", "resnet.ResNet50"}
TRAINED = [*SMALL, *(pytest.param(name, marks=[pytest.mark.slow] if name in DEEP else []) for name in MODELS)]


def build(name):
    """(model, x, y) ready to train on random data, the same at every call."""
    rng = np.random.default_rng(2)
    device.get_default_device().SetRandSeed(3)
    if name in SMALL:
        shape, arguments, lr = SMALL[name]
        net = load("resnet.ResNet")(**arguments)
    else:
        shape, _, lr = MODELS[name]
        net = load(name)()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=lr, momentum=0.9)))
    x = tensor.from_numpy(rng.normal(size=shape).astype(np.float32))
    net.compile([x])
    return net, x, tensor.from_numpy(rng.integers(0, 10, shape[0]).astype(np.int32))


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_parameters_is_that_of_the_formula(name):
    net, x, _ = build(name)
    count = sum(param.size() for param in net.get_params().values())
    assert count == MODELS[name][1] == PUBLISHED[name]
    net.eval()
    assert net(x).shape == (x.shape[0], 1000 if name.endswith("50") else 10)


@pytest.mark.parametrize("name", TRAINED)
def test_every_parameter_changes_in_a_step_and_some_steps_lower_the_loss(name):
    net, x, y = build(name)
    before = {key: tensor.to_numpy(param) for key, param in net.get_params().items()}
    losses = [net(x, y)[1].item()]
    same = [key for key, value in before.items() if (tensor.to_numpy(net.get_params()[key]) == value).all()]
    assert not same
    losses += [net(x, y)[1].item() for _ in range(5)]
    assert losses[-1] < 0.7 * losses[0]


def test_resnets_halve_the_image_at_each_stage_and_project_where_the_shape_changes():
    for name, channels, blocks in (("ResNet20", (16, 32, 64), 3), ("ResNet18", (64, 128, 256, 512), 2)):
        net = load(f"resnet.{name}")()
        y = net.conv(tensor.zeros((1, 3, 32, 32)))
        shapes = [(y := block(y)).shape for block in net.blocks]
        expected = [(1, width, 32 >> stage, 32 >> stage) for stage, width in enumerate(channels)]
        assert shapes == [shape for shape in expected for _ in range(blocks)]
        projected = [number for number, block in enumerate(net.blocks) if block.is_projected]
        assert projected == [blocks * stage for stage in range(1, len(channels))]


def test_resnet_50_halves_the_image_in_stem_and_pool_and_at_each_stage_but_the_first():
    net = load("resnet.ResNet50")()
    x = tensor.zeros((1, 3, 64, 64))
    y = net.pool(net.conv(x))
    assert y.shape == (1, 64, 16, 16)
    shapes = [(y := block(y)).shape for block in net.blocks]
    blocks = {256: 3, 512: 4, 1024: 6, 2048: 3}
    assert shapes == [
        (1, width, 4096 // width, 4096 // width) for width, n in blocks.items() for _ in range(n)
    ]
    assert [number for number, block in enumerate(net.blocks) if block.is_projected] == [0, 3, 7, 13]


def test_a_block_adds_its_input_before_the_last_relu():
    for name, width, last in (("BasicBlock", 4, "bn2"), ("Bottleneck", 1, "bn3")):
        block = load(f"resnet.{name}")(width, 1, False)
        x = tensor.from_numpy(np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype(np.float32))
        block(x)
        getattr(block, last).scale.set_value(0.0)
        np.testing.assert_array_equal(tensor.to_numpy(block(x)), np.maximum(tensor.to_numpy(x), 0))


def test_batch_norms_take_a_tenth_of_each_batch_into_their_statistics():
    net = load("resnet.ResNet20")()
    norms = [net.bn, *(norm for block in net.blocks for norm in vars(block).values())]
    norms = [norm for norm in norms if isinstance(norm, layer.BatchNorm2d)]
    assert len(norms) == 21 and {norm.momentum for norm in norms} == {0.1}
