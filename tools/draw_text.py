"""Draw the text of `ignite_ddl/course/text`, Jane Austen's "Persuasion", from Debian's R package of her novels.

The source is Debian's package `r-cran-janeaustenr` (1.0.0-1), which holds the six novels as R data. R is not
needed, so the package may be unpacked instead of installed:

    apt-get download r-cran-janeaustenr
    dpkg-deb -x r-cran-janeaustenr_*.deb unpacked
    python tools/draw_text.py --source unpacked/usr/lib/R/site-library/janeaustenr/data
    python tools/draw_text.py --source ... --out FOLDER   # draws somewhere else

The lines of the novel are joined and nothing is changed, so that whoever runs this gets the same bytes.
"""

import argparse
import bz2
import gzip
import hashlib
import lzma
import struct
import zlib
from pathlib import Path

SOURCE = Path("/usr/lib/R/site-library/janeaustenr/data")  # where Debian's package puts its files
OUT = Path(__file__).parents[1] / "ignite_ddl" / "course" / "text"
NOVEL = "persuasion"
SHA256 = "8061549557aebd2fd6e353d18d9197cb707029112bd52d4d8b174583a925848a"


class Reader:
    """Reads what R's ``saveRDS`` writes in its binary format (XDR), as far as lists, numbers and text go."""

    def __init__(self, content):
        if content[:2] != b"X\n":
            raise SystemExit("the data are not in R's binary format")
        self.content, self.at = content, 2
        version = self.integers(3)[0]  # then the R that wrote it, and the oldest that reads it
        if version == 3:
            self.text(self.integers(1)[0])  # the native encoding's name

    def integers(self, n):
        self.at += 4 * n
        return struct.unpack_from(f">{n}i", self.content, self.at - 4 * n)

    def text(self, n):
        self.at += n
        return self.content[self.at - n : self.at].decode("utf-8")

    def value(self):
        """The next value, and the names that it has for its parts (None where it has none)."""
        flags = self.integers(1)[0]
        kind, has_attributes = flags & 255, bool(flags & 0x200)
        if kind == 9:  # one string; -1 is R's missing one
            length = self.integers(1)[0]
            return (None if length == -1 else self.text(length)), None
        if kind not in (10, 13, 16, 19):  # logical, integer, character, list
            raise SystemExit(f"the data hold R's type {kind}, which this script does not read")
        n = self.integers(1)[0]
        values = self.integers(n) if kind in (10, 13) else [self.value() for _ in range(n)]
        if kind == 16:
            values = [string for string, _ in values]
        return values, (self.names() if has_attributes else None)

    def names(self):
        """The attribute list of a value that has one attribute, its names."""
        flags = self.integers(1)[0]
        symbol = self.integers(1)[0] & 255
        if flags & 255 != 2 or symbol not in (1, 255):  # a pair list, tagged with a symbol, new or met before
            raise SystemExit("the data hold attributes other than names, which this script does not read")
        if symbol == 1:
            self.value()
        names, _ = self.value()
        if self.integers(1)[0] & 255 != 254:
            raise SystemExit("the data hold attributes other than names, which this script does not read")
        return names


def novel(source):
    """The lines of the novel, from R's lazy-load database: an index (.rdx) of places in a data file (.rdb)."""
    (variables, *_), _ = Reader(gzip.decompress((source / "Rdata.rdx").read_bytes())).value()
    places, names = variables
    (start, length), _ = places[names.index(NOVEL)]
    packed = (source / "Rdata.rdb").read_bytes()[start : start + length]
    # Four bytes with the unpacked length, then for all but zlib's a letter that says how it was packed.
    if packed[4:5] == b"2":
        content = bz2.decompress(packed[5:])
    elif packed[4:5] == b"Z":
        content = lzma.decompress(packed[5:])
    else:
        content = zlib.decompress(packed[4:])
    lines, _ = Reader(content).value()
    return lines


def draw(source, out):
    content = ("\n".join(novel(source)) + "\n").encode("ascii")
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{NOVEL}.txt: sha256 is {found}, expected {SHA256}")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{NOVEL}.txt").write_bytes(content)
    print(f"{NOVEL}.txt {len(content):>9,} bytes, sha256 as recorded")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder with Rdata.rdx and Rdata.rdb")
    parser.add_argument("--out", type=Path, default=OUT, help="folder that gets the text")
    arguments = parser.parse_args()
    draw(arguments.source, arguments.out)
