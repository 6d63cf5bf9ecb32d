"""Fashion-MNIST, and torchvision beside any torch."""

import hashlib
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ignite_ddl as ddl
import ignite_ddl.course.data as data
from ignite_ddl.course.data import CLASSES, fashion_mnist, fashion_mnist_tensors, normalise
from ignite_ddl.course.vision import import_torchvision

REPOSITORY = Path(__file__).parents[2]
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def prints(code):
    """What a fresh Python, which has imported nothing yet, prints when it runs `code`."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


# ---- vision


@pytest.mark.slow  # a fresh Python that imports torchvision
def test_torchvision_imports_beside_a_torch_that_its_operators_do_not_fit():
    code = """
        import gc, sys, torch
        try:
            import torchvision
        except RuntimeError as error:
            print(error)
        else:
            sys.exit()

        from ignite_ddl.course.vision import import_torchvision
        torchvision = import_torchvision()
        assert import_torchvision() is torchvision is sys.modules["torchvision"]
        gc.collect()
        torch.ops.torchvision.nms.default, torch.ops.torchvision.qnms.default   # the declarations live on

        from torchvision.transforms import v2
        image, _ = torchvision.datasets.FakeData(1, (3, 40, 40), transform=v2.PILToTensor())[0]
        with torch.no_grad():
            scores = torchvision.models.squeezenet1_1()(v2.ToDtype(torch.float32, scale=True)(image)[None])
        print(*scores.shape)
    """
    lines = prints(code)
    if not lines:
        pytest.skip("torchvision imports by itself here, so there is nothing to repair")
    assert lines == ["operator torchvision::nms does not exist", "1 1000"]


@pytest.mark.slow  # a fresh Python that imports torchvision
def test_nothing_is_declared_where_the_operators_load():
    # Operators with code, as torchvision's C++ library brings them where it fits torch. Declaring one of them
    # again would raise, and they have to keep their code.
    code = """
        import torch
        try:
            import torchvision
        except RuntimeError:   # the real ones do not load here
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                library.impl(name, lambda dets, scores, iou_threshold: torch.tensor([0]), "CPU")

        boxes, scores = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 2], [5, 5, 6, 6]]), torch.tensor([0.9, 0.8, 0.7])
        before = torch.ops.torchvision.nms(boxes, scores, 0.5)  # the real one's [0, 2], or the [0] above

        from ignite_ddl.course import import_torchvision, vision
        import_torchvision()
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        print(vision._TorchvisionLoader.declared, kept.tolist() == before.tolist(), kept.tolist() in ([0, 2], [0]))
    """
    assert prints(code) == ["[] True True"]


@pytest.mark.slow  # ranks that import torchvision
def test_ranks_import_torchvision_by_themselves():
    def draws(local_rank):
        import torchvision

        return len(torchvision.datasets.FakeData(3))

    with ddl.Parallel("gloo", nproc_per_node=2, timeout=60, threads_per_rank=1) as parallel:
        assert parallel.run(draws) == [3, 3]


def test_other_import_errors_come_through(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    with pytest.raises(ImportError):
        import_torchvision()


# ---- data: the subset


@pytest.mark.parametrize(("train", "count"), [(True, 6000), (False, 1000)])
def test_subset_is_torchvisions_dataset_with_balanced_classes(train, count):
    dataset = fashion_mnist(train=train)
    assert type(dataset) is import_torchvision().datasets.FashionMNIST
    assert len(dataset) == count
    assert dataset.targets.bincount().tolist() == [count // 10] * 10
    assert tuple(dataset.classes) == CLASSES
    image, label = dataset[0]
    assert (image.dtype, image.shape, label) == (torch.float32, (1, 28, 28), 9)
    assert dataset.targets[:64].unique().numel() == 10  # in the original order the classes come mixed


def test_readme_records_the_files_sums():
    readme = (data.SUBSET / "README.md").read_text()
    for name in data.FULL_SIZES:
        content = (data.SUBSET / "FashionMNIST" / "raw" / name).read_bytes()
        assert f"| `{name}` | {len(content):,} | `{hashlib.sha256(content).hexdigest()}` |" in readme


def test_drawing_script_reproduces_the_subset(tmp_path):
    if not DEBIAN.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    script = REPOSITORY / "tools" / "draw_fashion_mnist.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True, stdout=subprocess.DEVNULL)
    for name in data.FULL_SIZES:
        assert (tmp_path / name).read_bytes() == (data.SUBSET / "FashionMNIST" / "raw" / name).read_bytes()


def test_default_transform_is_torchvisions_normalisation():
    import_torchvision()
    from torchvision.transforms import v2

    scale = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.2860], [0.3530])])
    expected, ours = fashion_mnist(transform=scale), fashion_mnist()
    for index in range(10):
        torch.testing.assert_close(ours[index][0], expected[index][0].as_subclass(torch.Tensor))
    assert fashion_mnist(transform=None)[0][0].size == (28, 28)  # a PIL image
    with pytest.raises(ValueError, match=r"image has the shape \(28, 28, 3\).*grey"):
        normalise(np.zeros((28, 28, 3), np.uint8))


@pytest.mark.parametrize("train", [True, False])
def test_tensors_equal_the_dataset_bit_for_bit(train):
    dataset, tensors = fashion_mnist(train=train), fashion_mnist_tensors(train=train)
    images, labels = next(iter(DataLoader(dataset, batch_size=len(dataset))))
    assert torch.equal(images, tensors.tensors[0])
    assert torch.equal(labels, tensors.tensors[1])
    assert (labels.dtype, tensors.tensors[1].dtype) == (torch.int64, torch.int64)


@pytest.mark.slow  # a fresh Python that imports torchvision
def test_torchvision_is_imported_only_when_a_dataset_needs_it(tmp_path):
    # here the dataset comes from another process, with a transform of torchvision's inside, which must not be
    # imported before torchvision's repair
    import_torchvision()
    from torchvision.transforms import v2

    path = tmp_path / "dataset.pickle"
    path.write_bytes(pickle.dumps(fashion_mnist(train=False, transform=v2.PILToTensor())))
    code = f"""
        import pickle, sys
        from ignite_ddl.course.data import fashion_mnist_tensors
        assert len(fashion_mnist_tensors(train=False)) == 1000
        print({{"torchvision", "matplotlib"}} & set(sys.modules))

        with open({str(path)!r}, "rb") as file:
            dataset = pickle.load(file)
        print(type(dataset).__name__, len(dataset), dataset[0][0].dtype)
    """
    assert prints(code) == ["set()", "FashionMNIST 1000 torch.uint8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "test"}, "train is 'test'.*True or False"),
        ({"full": 1}, "full is 1.*True or False"),
        ({"transform": "normalise"}, "transform is 'normalise'.*callable"),
        ({"root": "nowhere"}, "root is 'nowhere'.*FashionMNIST/raw.*train-images-idx3-ubyte"),
        ({"root": data.SUBSET, "full": True}, "without the full Fashion-MNIST"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        fashion_mnist(**arguments)
    if "transform" not in arguments:
        with pytest.raises(ValueError, match=message):
            fashion_mnist_tensors(**arguments)


# ---- data: the full set, played by small files


@pytest.fixture
def small_full_set(tmp_path, monkeypatch):
    """A machine without any full set, on which a full set has 4 training and 2 test images."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))  # HOME on Windows
    monkeypatch.delenv("IGNITE_DDL_DATA", raising=False)
    contents = {}
    for part, count in (("train", 4), ("t10k", 2)):
        images, labels = bytes(range(count)) * 784, bytes(range(count))
        size = count.to_bytes(4, "big")
        side = (28).to_bytes(4, "big")
        contents[f"{part}-images-idx3-ubyte"] = b"\0\0\x08\x03" + size + side + side + images
        contents[f"{part}-labels-idx1-ubyte"] = b"\0\0\x08\x01" + size + labels
    monkeypatch.setattr(data, "FULL_SIZES", {name: len(content) for name, content in contents.items()})
    return contents


def write_raw(folder, contents, before_a_file=lambda: None):
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in contents.items():
        before_a_file()
        (raw / name).write_bytes(content)


@pytest.fixture
def no_network(monkeypatch):
    """Makes torchvision's download fail, and records the socket time-out under which it tried."""
    timeouts = []

    def download(dataset):
        import socket

        timeouts.append(socket.getdefaulttimeout())
        raise RuntimeError("no route to host")

    monkeypatch.setattr(import_torchvision().datasets.FashionMNIST, "download", download)
    return timeouts


def test_root_names_a_copy(small_full_set, no_network, tmp_path):
    write_raw(tmp_path / "mine", small_full_set)
    for full in (True, False):
        assert fashion_mnist(root=tmp_path / "mine", full=full).targets.tolist() == [0, 1, 2, 3]
    assert fashion_mnist_tensors(root=str(tmp_path / "mine"), train=False)[1][1] == 1


def test_environment_variable_names_a_copy(small_full_set, no_network, tmp_path, monkeypatch):
    write_raw(tmp_path / "shared", small_full_set)
    monkeypatch.setenv("IGNITE_DDL_DATA", str(tmp_path / "shared"))
    assert len(fashion_mnist(full=True)) == 4
    assert len(fashion_mnist_tensors(full=True, train=False)) == 2
    assert len(fashion_mnist()) == 6000  # the subset does not depend on what a machine has
    assert not (tmp_path / "home").exists()


def cache():
    return Path.home() / ".cache" / "ignite_ddl"


def download_from(monkeypatch, *given):
    download = lambda dataset: write_raw(Path(dataset.root), *given)  # noqa: E731
    monkeypatch.setattr(import_torchvision().datasets.FashionMNIST, "download", download)


@pytest.mark.parametrize("there", ["nothing", "an incomplete copy"])
def test_download_goes_into_the_cache(there, small_full_set, monkeypatch):
    if there != "nothing":
        write_raw(cache(), {name: content[:-1] for name, content in small_full_set.items()})
    download_from(monkeypatch, small_full_set)
    assert len(fashion_mnist_tensors(full=True)) == 4
    assert [path.name for path in cache().iterdir()] == ["FashionMNIST"]  # nothing temporary is left


def test_half_a_download_is_never_in_the_cache(small_full_set, monkeypatch):
    """One rank stops in the middle of its download; meanwhile another downloads all and reads it."""
    stopped, go_on = threading.Event(), threading.Event()

    def stop_the_slow_one():
        if threading.current_thread() is slow:
            stopped.set()
            assert go_on.wait(30)

    download_from(monkeypatch, small_full_set, stop_the_slow_one)
    slow = threading.Thread(target=fashion_mnist_tensors, kwargs={"full": True})
    slow.start()
    try:
        assert stopped.wait(30)
        assert not (cache() / "FashionMNIST").exists()
        assert len(fashion_mnist_tensors(full=True)) == 4
    finally:
        go_on.set()
        slow.join(30)
    raw = cache() / "FashionMNIST" / "raw"
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == small_full_set


def test_without_a_network_the_error_says_where_it_looked(small_full_set, no_network, tmp_path, monkeypatch):
    import socket

    monkeypatch.setenv("IGNITE_DDL_DATA", str(tmp_path / "empty"))
    before = socket.getdefaulttimeout()
    with pytest.raises(FileNotFoundError) as error:
        fashion_mnist(full=True)
    for part in ("no route to host", tmp_path / "empty", cache(), "full=False"):
        assert str(part) in str(error.value)
    assert no_network == [10]  # seconds: it does not hang
    assert socket.getdefaulttimeout() == before
    assert list(cache().iterdir()) == []
