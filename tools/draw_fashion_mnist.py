"""Draw the Fashion-MNIST subset of `ignite_ddl/course/fashion_mnist` from the full set.

The source is Debian's package `dataset-fashion-mnist` (0.0~git20200523.55506a9-1, `apt-get install
dataset-fashion-mnist`): Zalando's four .gz files, but for the name and time in their gzip headers. Of each
class the first 600 training images and the first 100 test images are kept, in the order of the original.
Nothing is random, so that whoever runs this gets the same bytes:

    python tools/draw_fashion_mnist.py                # draws into the package
    python tools/draw_fashion_mnist.py --out FOLDER   # draws somewhere else
"""

import argparse
import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np

SOURCE = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts its files
OUT = Path(__file__).parents[1] / "ignite_ddl" / "course" / "fashion_mnist" / "FashionMNIST" / "raw"
PER_CLASS = {"train": 600, "t10k": 100}

INPUTS_SHA256 = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}
OUTPUTS_SHA256 = {
    "train-images-idx3-ubyte": "cf313073c7eb485392848071d5c433571d7166043e971e3345b095cc30518084",
    "train-labels-idx1-ubyte": "097b93fbcf9bd5bc648b1a457ddc55c9e4ab49afb33f9ecae8ce068399a75e3a",
    "t10k-images-idx3-ubyte": "7cee33c3c6414b1b86c25e665a6c4f41584269de3b7cc9768b1d351922845eef",
    "t10k-labels-idx1-ubyte": "3128d790775889812b73c4f13923559c8b9e281d112c6ea7862acf60a206a909",
}


def check(name, content, expected):
    found = hashlib.sha256(content).hexdigest()
    if found != expected[name]:
        raise SystemExit(f"{name}: sha256 is {found}, expected {expected[name]}")


def read(path):
    """The array in a gzipped idx file: two zeros, type 8 (unsigned byte), number of dims, dims, values."""
    content = path.read_bytes()
    check(path.name, content, INPUTS_SHA256)
    content = gzip.decompress(content)
    ndim = content[3]
    shape = struct.unpack_from(f">{ndim}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def write(path, array):
    content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    check(path.name, content, OUTPUTS_SHA256)
    path.write_bytes(content)
    print(f"{path.name:25} {str(array.shape):16} {len(content):>9,} bytes, sha256 as recorded")


def draw(source, out):
    out.mkdir(parents=True, exist_ok=True)
    for part, per_class in PER_CLASS.items():
        images = read(source / f"{part}-images-idx3-ubyte.gz")
        labels = read(source / f"{part}-labels-idx1-ubyte.gz")
        first = [np.flatnonzero(labels == label)[:per_class] for label in range(10)]
        keep = np.sort(np.concatenate(first))  # sorted: the original's order, classes mixed as they were
        write(out / f"{part}-images-idx3-ubyte", images[keep])
        write(out / f"{part}-labels-idx1-ubyte", labels[keep])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder with the four .gz files")
    parser.add_argument("--out", type=Path, default=OUT, help="folder that gets the four idx files")
    arguments = parser.parse_args()
    draw(arguments.source, arguments.out)
