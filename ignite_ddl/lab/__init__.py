"""What only the chapters use: data, small models and the checks of the exercises."""

from ignite_ddl.lab.data import CLASSES, fashion_mnist, fashion_mnist_tensors, normalise
from ignite_ddl.lab.delay import Delay
from ignite_ddl.lab.gpt import GPT, generate
from ignite_ddl.lab.line import SlowLine
from ignite_ddl.lab.models import CNN, MLP
from ignite_ddl.lab.saved import SavedBytes
from ignite_ddl.lab.text import CharacterText
from ignite_ddl.lab.vision import import_torchvision

__all__ = [
    "CLASSES",
    "CNN",
    "GPT",
    "MLP",
    "CharacterText",
    "Delay",
    "SavedBytes",
    "SlowLine",
    "fashion_mnist",
    "fashion_mnist_tensors",
    "generate",
    "import_torchvision",
    "normalise",
]
