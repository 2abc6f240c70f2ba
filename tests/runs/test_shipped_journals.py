"""The journals of docs/journals give the weights of their runs again, on one and on two ranks."""

import re

import pytest
from commands import REPOSITORY, run_forked_well
from thorough import thorough

MODEL = REPOSITORY / "runs" / "demo" / "assets" / "SmolLM2-135M-Instruct"
JOURNALS = sorted(
    (REPOSITORY / "docs" / "journals").glob("*.lezo"), key=lambda path: path.stat().st_size
)


def test_there_is_a_journal():
    assert JOURNALS


@pytest.mark.distributed
@pytest.mark.skipif(not MODEL.is_dir(), reason=f"make replay fetches {MODEL}")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "journal", [*JOURNALS[:1], *map(thorough, JOURNALS[1:])], ids=lambda path: path.stem
)
def test_a_journal_gives_the_weights_of_its_run(journal, num_ranks, tmp_path):
    words = ["--journal", journal, f"model.path={MODEL}", "--out", tmp_path / "model"]
    finished = run_forked_well(words, program="export", num_ranks=num_ranks)
    (digest,) = re.findall(r"digest of the weights: (\w+) \(the same as in the run\)", finished.err)
    assert digest in (journal.parent / "README.md").read_text()
