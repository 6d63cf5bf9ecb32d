"""The Python of README.md and docs/coming_from.md runs as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The README's second example is of names that a reader has.
OF_THE_READER = """
import ignite_ddl as ddl, torch
class GPT(torch.nn.Sequential):
    tensor_plan = {"0": ddl.Column(), "2": ddl.Row()}
    def __init__(self, config):
        super().__init__(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
dataset, config = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(3, (64,))), None
loss_fn = torch.nn.functional.cross_entropy
"""


def blocks():
    for page in ("README.md", "docs/coming_from.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for n, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)):
            larger = (
                pytest.mark.slow if "nproc_per_node=8" in block or ".compile(" in block else ()
            )  # dynamo takes its time
            yield pytest.param(block, id=f"{page} {n}", marks=larger)


@pytest.mark.parametrize("block", list(blocks()))
def test_a_block_of_code_runs(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}  # functions of a script or a cell: they travel by value
    exec(OF_THE_READER if "GPT(config)" in block else "", space)
    exec(block, space)


def test_links_of_the_page_lead_somewhere():
    page = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
