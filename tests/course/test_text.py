"""ignite_ddl.course.text: the file, its pieces, its vocabulary."""

import hashlib
import pickle
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import ignite_ddl.course.text as text
from ignite_ddl.course.text import CharacterText

REPOSITORY = Path(__file__).parents[2]
CHARACTERS = CharacterText.vocabulary


def test_the_file_is_the_recorded_one():
    content = text.TEXT.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    assert found in (text.TEXT.parent / "README.md").read_text()
    assert found in (REPOSITORY / "tools" / "draw_text.py").read_text()
    assert 300_000 < len(content) < 500_000
    assert content.isascii()


def test_the_vocabulary_is_the_texts_characters_and_room_for_ranks():
    assert "".join(sorted(set(text.TEXT.read_text()))) == CHARACTERS
    assert len(CHARACTERS) < CharacterText.vocabulary_size
    assert all(CharacterText.vocabulary_size % tp == 0 for tp in (1, 2, 4, 8))


def test_the_splits_are_the_whole_text_in_order():
    parts = [CharacterText(split) for split in ("train", "test")]
    assert parts[0].text + parts[1].text == text.TEXT.read_text()
    assert [len(part) for part in parts] == [6565, 729]  # the numbers of the docstring


@pytest.mark.parametrize("written", ["", CHARACTERS, CharacterText("test").text])
def test_decode_undoes_encode(written):
    ids = CharacterText.encode(written)
    assert ids.shape == (len(written),)
    assert ids.dtype == torch.long
    assert CharacterText.decode(ids) == CharacterText.decode(ids.tolist()) == written


@pytest.mark.parametrize("length", [1, 64, 645])
def test_pieces_lie_end_to_end_and_y_is_one_on(length):
    dataset = CharacterText("test", length)
    for index in (0, 1, len(dataset) - 1):
        x, y = dataset[index]
        start = index * length
        assert x.shape == y.shape == (length,)
        assert x.dtype == y.dtype == torch.long
        assert CharacterText.decode(x) == dataset.text[start : start + length]
        assert CharacterText.decode(y) == dataset.text[start + 1 : start + length + 1]
    left = len(dataset.text) - len(dataset) * length
    assert 0 < left <= length  # less than a piece and its next character


def test_it_is_a_map_style_dataset():
    dataset = CharacterText("test", 32)
    assert dataset[-1][0].equal(dataset[len(dataset) - 1][0])
    with pytest.raises(IndexError, match=re.escape(f"index is {len(dataset)}")):
        dataset[len(dataset)]
    assert sum(len(x) for x, _ in DataLoader(dataset, batch_size=64)) == len(dataset)
    copy = pickle.loads(pickle.dumps(dataset))
    assert all(torch.equal(a, b) for a, b in zip(copy[7], dataset[7], strict=True))


def test_a_reserved_id_shows():
    assert CharacterText.decode([CHARACTERS.index("a"), 75, 79]) == "a" + 2 * "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CharacterText("validation"), "split is 'validation'; it has to be 'train' or 'test'"),
        (lambda: CharacterText(length=0), "length should be a positive integer, but given 0"),
        (lambda: CharacterText(length=2.0), "length should be a positive integer, but given 2.0"),
        (lambda: CharacterText("test", 46_686), "length is 46686, but the test text has 46,686 characters"),
        (lambda: CharacterText.encode("naïve"), "text has the character 'ï', which is not in the vocabulary"),
        (lambda: CharacterText.decode([80]), "from 0 to 79, but has 80"),
        (lambda: CharacterText.decode(torch.tensor([-1])), "from 0 to 79, but has -1"),
        (lambda: CharacterText.decode([0.5]), "ids should be whole numbers from 0 to 79, but has 0.5"),
        (lambda: CharacterText.decode(torch.zeros(1, 1).long()), "ids should be whole numbers"),
    ],
)
def test_bad_input_says_what_fits(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_the_drawing_script_gives_the_same_bytes(tmp_path):
    tool = runpy.run_path(str(REPOSITORY / "tools" / "draw_text.py"))
    if not tool["SOURCE"].is_dir():
        pytest.skip(f"no {tool['SOURCE']} here (Debian's r-cran-janeaustenr)")
    tool["draw"](tool["SOURCE"], tmp_path)
    assert (tmp_path / "persuasion.txt").read_bytes() == text.TEXT.read_bytes()
