"""Two small models for 28 × 28 grey images: a multilayer perceptron and a convolutional network.

Neither has BatchNorm or dropout, so that a run on several ranks can equal one process exactly, also in
float64 (`model.double()`). Both are `nn.Sequential`, so that a pipeline can split them by layers.
The weights come from torch's random stream: call `torch.manual_seed` first where they must be the same.
"""

from collections import OrderedDict

from torch import nn
from torch.distributed.tensor import Replicate

from ignite_ddl.arguments import COUNT, check
from ignite_ddl.tensor import Column, InputChannels, OutputChannels, Row


class MLP(nn.Sequential):
    """Linear layers with ReLU between them.

    Args:
        in_features: Values in a row of the input after flattening. Default: 784, which is 28 × 28.
        hidden: Width of all layers except the last. Default: 128.
        out_features: Number of classes. Default: 10.
        layers: Number of linear layers, at least 1. Default: 2.

    Attributes:
        tensor_plan: The tensor-parallel plan: linear layers in pairs, by columns and then by rows; a last layer
            without a partner is replicated. The class attribute is the plan for two layers.

    Returns:
        Of its forward: logits of shape (N, out_features), for an input of shape (N, ...) that flattens to
        (N, in_features).

    Raises:
        ValueError: If an argument is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> from ignite_ddl.course import MLP
        >>> MLP(hidden=32, layers=3)(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    tensor_plan = {"linear1": Column(), "linear2": Row()}

    def __init__(self, in_features=784, hidden=128, out_features=10, layers=2):
        _check_counts(in_features=in_features, hidden=hidden, out_features=out_features, layers=layers)
        modules = OrderedDict(flatten=nn.Flatten())  # (N, 1, 28, 28) -> (N, in_features)
        for index in range(1, layers):
            modules[f"linear{index}"] = nn.Linear(in_features if index == 1 else hidden, hidden)  # (N, hidden)
            modules[f"relu{index}"] = nn.ReLU()
        modules[f"linear{layers}"] = nn.Linear(in_features if layers == 1 else hidden, out_features)
        super().__init__(modules)
        styles = MLP.tensor_plan.values()
        paired = range(1, layers - layers % 2 + 1)
        self.tensor_plan = {f"linear{i}": list(styles)[(i - 1) % 2] for i in paired}

    def __getitem__(self, index):
        return _layers_at(self, index)


class CNN(nn.Sequential):
    """Two convolutions and a linear layer, for 28 × 28 grey images.

    On the Fashion-MNIST subset, SGD with lr 0.05, momentum 0.9 and batches of 64 classifies 80 to 85 % of the
    test images correctly after 2 epochs and 83 to 87 % after 3 (six seeds), at 0.6 s an epoch on one CPU core.

    Args:
        channels: Channels of the first convolution; the second has twice as many. Default: 8, which makes
            9,098 parameters.
        out_features: Number of classes. Default: 10.

    Attributes:
        tensor_plan: The tensor-parallel plan: the first convolution by output channels, the second by input
            channels, the linear layer by rows.

    Returns:
        Of its forward: logits of shape (N, out_features), for images of shape (N, 1, 28, 28).

    Raises:
        ValueError: If an argument is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> from ignite_ddl.course import CNN
        >>> CNN()(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    tensor_plan = {"conv1": OutputChannels(), "conv2": InputChannels(), "linear": Row(input_layouts=Replicate())}

    def __init__(self, channels=8, out_features=10):
        _check_counts(channels=channels, out_features=out_features)
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(1, channels, kernel_size=3, padding=1),  # (N, channels, 28, 28)
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),  # (N, channels, 14, 14)
                conv2=nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),  # (N, 2 * channels, 14, 14)
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),  # (N, 2 * channels, 7, 7)
                flatten=nn.Flatten(),  # (N, 2 * channels * 49)
                linear=nn.Linear(2 * channels * 7 * 7, out_features),  # (N, out_features)
            )
        )

    def __getitem__(self, index):
        return _layers_at(self, index)


def _layers_at(model, index):
    """`model[2]` is a layer; `model[:4]` a plain Sequential, because a part of a CNN is not a CNN."""
    if isinstance(index, slice):
        return nn.Sequential(OrderedDict(list(model.named_children())[index]))
    return nn.Sequential.__getitem__(model, index)


def _check_counts(**counts):
    for name, count in counts.items():
        check(name, count, COUNT)
