"""Writes docs/families.md: what was compared with transformers for each family, and what came out.

python tests/helpers/family_page.py            all families, in about 25 minutes on one core
python tests/helpers/family_page.py opt llama  these families; the other rows stay as they are
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from family_models import KNOWN, NOT_BUILT, published_class

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "families.md"
COLUMNS = ("losses", "packed", "answers", "step", "rank 1", "export", "LoRA")
FAMILIES = [name for name in KNOWN if name not in NOT_BUILT]
_FAMILIES_AT_A_TIME = 8

_REASONS = {
    "R1": (
        "zo.noise_rank perturbs plain products only",
        "Low rank supports only plain matrix products.",
    ),
    "R2": (
        "without a batch dimension",
        "A module cannot be split into two probes: set `zo.probes_per_pass=1`.",
    ),
    "R3": ("no transformer blocks", "Its blocks have several classes."),
    "R4": ("cannot be read in slices", "Its checkpoint stores weights in another order."),
    "R5": ("zo.noise_rank needs all", "Low rank needs modules that run on all tokens."),
    "R6": ("peft.lora_targets", "A module with a target name does not support adapters."),
    "R7": ("lacks", "Its checkpoint has different names or shapes."),
    "R8": ("has an encoder", "It has an encoder."),
    "R9": ("peft does not read", "peft reads neither lezo_ds's adapter nor one of its own."),
}
"""Mark of a refusal -> (words of its line, what the page says)."""

_HEAD = """# Families

Each row is a tiny random model of a model family in transformers 5.23: all that
`AutoModelForCausalLM` opens, and some multimodal ones (images or audio plus text) that only
`AutoModelForMultimodalLM` opens. It is saved as its published class, multimodal if one exists.
lezo_ds and transformers read the same directory in fp32. transformers ran one sequence at a time.
`python tests/helpers/family_page.py` generates this page, and `make test-families` checks each row
against new results.

- **losses**: label log-probabilities in padded rows, over the full vocabulary and over labels only
- **packed**: the same with several sequences per row
- **answers**: greedy answers to prompts of different lengths, with and without a shared prefix
- **step**: the projected gradient of a step at two probes, and answers at both
- **rank 1**: the same with `zo.noise_rank=1`
- **export**: transformers opens the export with exactly the expected keys and the same values
- **LoRA**: the same for a merged adapter on all linear modules of the blocks, and for peft's merge

`=` means equal within 1e-4, and `-` means never packed. `D` differs and `E` ends in an error: do
not use these. A run checks itself against the plain model and rejects most of them before its first
step. R is rejected with a one-line error:

"""


def table_row(family: str, outcomes: Mapping[str, str]) -> str:
    """Return the row of a family, from what each comparison gave (`family_checks.outcome`)."""
    cells = [
        family,
        published_class(family).__name__,
        *(_cell(outcomes[column]) for column in COLUMNS),
    ]
    return f"| {' | '.join(cells)} |"


def _cell(outcome: str) -> str:
    if outcome == "equal":
        return "="
    if outcome.startswith("refused: not packed"):
        return "-"
    if outcome.startswith("differs"):
        return "D"
    for mark, (words, _) in _REASONS.items():
        if outcome.startswith("refused") and words in outcome:
            return mark
    return "E" if outcome.startswith("error") else "R"


def read_rows() -> dict[str, str]:
    """Return the rows of the page, by family."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    found = (re.match(r"\| ([\w-]+) \| \w+ \|", line) for line in lines)
    return {match[1]: match.string for match in found if match and match[1] != "family"}


def page_text(rows: Mapping[str, str]) -> str:
    """Return the page with these rows."""
    reasons = "".join(f"- {mark}: {text}\n" for mark, (_, text) in _REASONS.items())
    titles = ("family", "class", *COLUMNS)
    table = [f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]
    table += [rows[family] for family in FAMILIES if family in rows]
    not_built = "".join(f"- {family}: {reason}\n" for family, reason in NOT_BUILT.items())
    body = "\n".join(table)
    return f"{_HEAD}{reasons}\n{body}\n\nNot built here:\n\n{not_built}"


def outcomes_of(family: str) -> dict[str, str]:
    """Return what each comparison gave for a family."""
    from family_checks import CHECKS, Family, outcome

    with tempfile.TemporaryDirectory() as directory:
        checked = Family(family, Path(directory))
        return {name: outcome(checked, check) for name, check in CHECKS.items()}


def main(families: Iterable[str]) -> None:
    """Compare families in processes of their own, since one may crash, and write the page."""
    todo = list(families)
    rows = read_rows()
    for first in range(0, len(todo), _FAMILIES_AT_A_TIME):
        part = todo[first : first + _FAMILIES_AT_A_TIME]
        command = [sys.executable, __file__, "--print", *part]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        for line in done.stdout.splitlines():
            if line.startswith('{"family"'):
                found = json.loads(line)
                rows[found["family"]] = table_row(found["family"], found["outcomes"])
        PAGE.write_text(page_text(rows), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--print"]:
        for family in sys.argv[2:]:
            print(json.dumps({"family": family, "outcomes": outcomes_of(family)}), flush=True)
    else:
        main(sys.argv[1:] or FAMILIES)
