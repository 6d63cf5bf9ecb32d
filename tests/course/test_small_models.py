"""The two small models of the chapters."""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ignite_ddl.course.data import fashion_mnist_tensors
from ignite_ddl.course.models import CNN, MLP


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_mlp_shapes_and_parameters():
    model = MLP()
    assert model(torch.zeros(3, 1, 28, 28)).shape == model(torch.zeros(3, 784)).shape == (3, 10)
    assert count(model) == 784 * 128 + 128 + 128 * 10 + 10
    assert count(MLP(64, 16, 10, layers=4)) == 65 * 16 + 2 * 17 * 16 + 17 * 10
    assert count(MLP(64, 16, 10, layers=1)) == 65 * 10
    assert [type(layer).__name__ for layer in MLP()] == ["Flatten", "Linear", "ReLU", "Linear"]


def test_cnn_shapes_and_parameters():
    assert CNN()(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    assert count(CNN()) == 10 * 8 + 73 * 16 + 785 * 10 == 9098
    assert count(CNN(channels=4, out_features=2)) == 10 * 4 + 37 * 8 + 393 * 2


@pytest.mark.parametrize("make", [MLP, CNN])
def test_models_work_in_float64_row_by_row(make):
    # no layer mixes the rows of a batch or draws random numbers: what parity between ranks rests on
    torch.manual_seed(0)
    model = make().double()
    images = torch.rand(4, 1, 28, 28, dtype=torch.float64)
    whole = model(images)
    assert whole.dtype == torch.float64
    torch.testing.assert_close(torch.cat([model(image[None]) for image in images]), whole, rtol=0, atol=1e-14)
    whole.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("make", [MLP, CNN])
@pytest.mark.parametrize("value", [0, 2.0, True, None])
def test_bad_counts_are_named(make, value):
    with pytest.raises(ValueError, match=re.escape(f"out_features should be a positive integer, but given {value!r}")):
        make(out_features=value)


@pytest.mark.slow
def test_cnn_learns_fashion_mnist_in_three_epochs():
    torch.manual_seed(0)
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, labels in list(DataLoader(fashion_mnist_tensors(), batch_size=64, shuffle=True)) * 3:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    images, labels = fashion_mnist_tensors(train=False).tensors
    accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    assert 0.8 <= accuracy <= 0.9  # more than 0.9 from 6,000 images would mean that test images leaked in
