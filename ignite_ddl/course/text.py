"""A text as a dataset of characters: Jane Austen's "Persuasion" (1818), included in the package.

`ignite_ddl/course/text/README.md` gives the source of the text. Nothing is random, and nothing is downloaded.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils.data import Dataset

from ignite_ddl.arguments import COUNT, check, is_count

TEXT = Path(__file__).parent / "text" / "persuasion.txt"
CHARACTERS = "\n !\"&'(),-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWYZabcdefghijklmnopqrstuvwxyz"
IDS = {character: index for index, character in enumerate(CHARACTERS)}
TRAIN_SHARE = 0.9  # the novel's first nine tenths; its end is the test text
RESERVED = "\N{REPLACEMENT CHARACTER}"  # for ids without a character


class CharacterText(Dataset):
    """Pieces of the novel as inputs, and the same pieces shifted by one character as targets.

    The pieces do not overlap, so an epoch predicts each character once; an incomplete piece at the end is dropped.

    Args:
        split: "train" for the novel's first nine tenths, "test" for the rest. Default: "train".
        length: Characters in a piece. Default: 64, which makes 6,565 pieces, or 729 for testing.

    Attributes:
        vocabulary: The 75 characters of the text, in the order of their ids.
        vocabulary_size: 80, the vocabulary size of a model. Ids from 75 on never occur; they make the size divisible
            by 2, 4, 5, 8, 10 and 16 tensor-parallel ranks.

    Raises:
        ValueError: If ``split`` is unknown, or ``length`` is not a whole number below the length of the split.
        FileNotFoundError: If the text is not installed.

    Example:
        >>> from ignite_ddl.course import CharacterText
        >>> dataset = CharacterText("test", length=16)
        >>> x, y = dataset[0]
        >>> x.shape, x[1:].equal(y[:-1]), CharacterText.decode(x)
        (torch.Size([16]), True, 'trick, or some o')
    """

    vocabulary = CHARACTERS
    vocabulary_size = 80

    def __init__(self, split="train", length=64):
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}; it has to be 'train' or 'test'")
        check("length", length, COUNT)
        if not TEXT.is_file():
            raise FileNotFoundError(f"the text {TEXT} is missing: install ignite_ddl again")
        text = TEXT.read_text(encoding="ascii")
        cut = int(TRAIN_SHARE * len(text))
        self.split, self.length = split, length
        self.text = text[:cut] if split == "train" else text[cut:]
        if length >= len(self.text):
            raise ValueError(
                f"length is {length}, but the {split} text has {len(self.text):,} characters; "
                "a piece and the character after it have to fit in"
            )
        self.ids = self.encode(self.text).to(torch.uint8)  # an eighth of the memory

    def __len__(self):
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index):  # x and y, (length,) each
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"index is {index}, but there are {n} pieces")
        start = index % n * self.length
        piece = self.ids[start : start + self.length + 1].long()  # (length + 1,)
        return piece[:-1], piece[1:]

    @staticmethod
    def encode(text):
        """The ids of a text's characters.

        Args:
            text: A string of characters of the vocabulary.

        Returns:
            A long tensor of shape (len(text),).

        Raises:
            ValueError: If a character is not in the vocabulary.
        """
        try:
            return torch.tensor([IDS[character] for character in text], dtype=torch.long)
        except KeyError as error:
            raise ValueError(
                f"text has the character {error.args[0]!r}, which is not in the vocabulary {CHARACTERS!r}"
            ) from None

    @staticmethod
    def decode(ids):
        """The text of some ids. A reserved id, which an untrained model may draw, shows as a replacement character.

        Args:
            ids: A tensor of whole numbers of shape (N,), or a list of them.

        Returns:
            A string of N characters.

        Raises:
            ValueError: If an id is not below ``vocabulary_size``, or ``ids`` is no row of whole numbers.
        """
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        ids = list(ids) if isinstance(ids, Iterable) else [ids]
        for index in ids:
            if not is_count(index, least=0) or index >= CharacterText.vocabulary_size:
                last = CharacterText.vocabulary_size - 1
                raise ValueError(f"ids should be whole numbers from 0 to {last}, but has {index!r}")
        return "".join(CHARACTERS[index] if index < len(CHARACTERS) else RESERVED for index in ids)
