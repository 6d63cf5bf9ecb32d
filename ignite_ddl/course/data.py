"""Fashion-MNIST for the chapters: a subset that comes with the package, and the full set on request.

28 × 28 grey images of ten kinds of clothes. The subset (6,000 training and 1,000 test images, the same number
of each class) needs no network; `ignite_ddl/course/fashion_mnist/README.md` says how it was drawn.
"""

import copyreg
import os
import socket
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ignite_ddl.course.vision import import_torchvision

CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

# Mean and standard deviation of the 60,000 training images, on a scale from 0 to 1.
MEAN, STD = 0.2860, 0.3530

SUBSET = Path(__file__).parent / "fashion_mnist"

# torchvision's file names, with the size in bytes that each has in the full set.
FULL_SIZES = {
    "train-images-idx3-ubyte": 16 + 60_000 * 28 * 28,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 28 * 28,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}


def normalise(image):
    """A grey image as a normalised tensor: ``v2.ToImage``, ``ToDtype(scale=True)``, ``Normalize`` in one.

    Args:
        image: A grey PIL image or a uint8 array of shape (height, width), values 0 to 255.

    Returns:
        A float32 tensor of shape (1, height, width). Over the training images its mean is 0, its deviation 1.

    Raises:
        ValueError: If the image is not grey, that is, has not two dimensions.

    Example:
        >>> import numpy as np
        >>> from ignite_ddl.course import normalise
        >>> normalise(np.zeros((28, 28), np.uint8)).shape
        torch.Size([1, 28, 28])
    """
    pixels = np.array(image)
    if pixels.ndim != 2:
        raise ValueError(f"image has the shape {pixels.shape}; it has to be grey, of shape (height, width)")
    return _normalise(pixels[None])


def fashion_mnist(train=True, full=False, root=None, transform=normalise):
    """Fashion-MNIST as torchvision's own dataset, by default the subset that comes with the package.

    The dataset may be handed to other processes (ranks, loader workers), also where torchvision needs
    ``ignite_ddl.course`` there.

    Args:
        train: True for the training images, False for the test images. Default: True.
        full: False for the subset (6,000 training, 1,000 test images), True for the full set (60,000 and
            10,000). The full set is searched in the folder given by the environment variable
            ``IGNITE_DDL_DATA`` and in ``~/.cache/ignite_ddl``; if it is in neither, torchvision downloads it
            (30 MB) to ``~/.cache/ignite_ddl``. Default: False.
        root: A folder that contains ``FashionMNIST/raw``, used instead of all others. With ``full=True`` it has
            to contain the full set. Default: None.
        transform: Converts a PIL image to the model's input; None returns PIL images.
            Default: :func:`normalise`, which returns float32 of shape (1, 28, 28).

    Returns:
        A ``torchvision.datasets.FashionMNIST`` of pairs (image, label), label an int in [0, 9], an index into
        ``CLASSES``.

    Raises:
        ValueError: If an argument has the wrong type, or ``root`` does not contain Fashion-MNIST.
        FileNotFoundError: If the full set is not found and cannot be downloaded.

    Example:
        >>> from ignite_ddl.course import CLASSES, fashion_mnist
        >>> dataset = fashion_mnist()
        >>> image, label = dataset[0]
        >>> len(dataset), image.shape, CLASSES[label]
        (6000, torch.Size([1, 28, 28]), 'Ankle boot')
    """
    if transform is not None and not callable(transform):
        raise ValueError(f"transform is {transform!r}; it has to be callable, or None for PIL images")
    folder = _find(train, full, root)
    return _dataset_class()(folder, train=train, transform=transform)


def fashion_mnist_tensors(train=True, full=False, root=None):
    """The images and labels of :func:`fashion_mnist`, normalised once and stored in two tensors.

    ``fashion_mnist`` converts an image to PIL and to a tensor at each access. Here all images are converted once: a
    DataLoader iterates over the subset in 0.02 s instead of 0.18 s, and torchvision, whose import takes a second, is
    not needed. The values are bitwise equal.

    Args:
        train: As for :func:`fashion_mnist`.
        full: As for :func:`fashion_mnist`. The full training set takes 188 MB as float32, the subset 19 MB.
        root: As for :func:`fashion_mnist`.

    Returns:
        A ``TensorDataset`` of pairs (image, label). Its ``tensors`` are the images, float32 of shape
        (N, 1, 28, 28), and the labels, int64 of shape (N,).

    Raises:
        ValueError: As for :func:`fashion_mnist`.
        FileNotFoundError: As for :func:`fashion_mnist`.

    Example:
        >>> from ignite_ddl.course import fashion_mnist_tensors
        >>> images, labels = fashion_mnist_tensors(train=False).tensors
        >>> images.shape, labels.bincount().tolist()
        (torch.Size([1000, 1, 28, 28]), [100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    raw = _raw(_find(train, full, root))
    part = "train" if train else "t10k"
    # An idx file is a header of 4 bytes and 4 more for each dim, then the values.
    images = np.fromfile(raw / f"{part}-images-idx3-ubyte", np.uint8, offset=16).reshape(-1, 1, 28, 28)
    labels = np.fromfile(raw / f"{part}-labels-idx1-ubyte", np.uint8, offset=8)
    return TensorDataset(_normalise(images), torch.from_numpy(labels).long())


def _normalise(pixels):
    return (torch.from_numpy(pixels).float() / 255 - MEAN) / STD


def _dataset_class():
    fashion = import_torchvision().datasets.FashionMNIST
    # Another process that unpickles the dataset must import ignite_ddl.course first (see vision.py): pickle calls
    # _empty_dataset there, and sets the attributes afterwards.
    copyreg.pickle(fashion, lambda dataset: (_empty_dataset, (), dataset.__dict__))
    return fashion


def _empty_dataset():
    fashion = _dataset_class()
    return fashion.__new__(fashion)


def _find(train, full, root):
    """The folder in which torchvision finds ``FashionMNIST/raw``."""
    for name, value in (("train", train), ("full", full)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it has to be True or False")
    if root is not None:
        if not _holds(root, full):
            raise ValueError(
                f"root is {os.fspath(root)!r}, without {'the full' if full else 'a'} Fashion-MNIST; "
                f"it needs a folder FashionMNIST/raw with the unpacked files {', '.join(FULL_SIZES)}"
            )
        return root
    return _find_full() if full else SUBSET


def _find_full():
    named = os.environ.get("IGNITE_DDL_DATA")
    cache = Path.home() / ".cache" / "ignite_ddl"
    for folder in (named, cache):
        if folder and _holds(folder, full=True):
            return folder

    cache.mkdir(parents=True, exist_ok=True)
    # Several ranks may run this at once: each makes its own copy, and moves it into place file by file.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        try:
            _download(scratch)
        except Exception as error:  # no network, a broken file, a full disk
            raise FileNotFoundError(
                "the full Fashion-MNIST is not on this machine and its download failed "
                f"({str(error).strip() or type(error).__name__}). Looked in\n"
                f"  IGNITE_DDL_DATA: {named or 'not set'}\n"
                f"  the cache: {cache}\n"
                "Let IGNITE_DDL_DATA name a folder whose FashionMNIST/raw has the four unpacked files, or use "
                "full=False, which needs no network."
            ) from error
        _raw(cache).mkdir(parents=True, exist_ok=True)
        for name in FULL_SIZES:
            os.replace(_raw(scratch) / name, _raw(cache) / name)
    return cache


def _raw(folder):
    return Path(folder) / "FashionMNIST" / "raw"


def _holds(folder, full):
    """Whether the four files exist; for the full set, also whether their sizes are right."""
    files = {name: _raw(folder) / name for name in FULL_SIZES}
    if full:
        return all(file.is_file() and file.stat().st_size == FULL_SIZES[name] for name, file in files.items())
    return all(file.is_file() for file in files.values())


def _download(folder):
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)  # seconds; torchvision sets none, so a dead network would hang forever
    try:
        _dataset_class()(folder, download=True)
    finally:
        socket.setdefaulttimeout(timeout)
