"""Writes docs/families.md: what was compared with transformers for each family, and what came out.

python tests/helpers/family_page.py            all families, in about 35 minutes on one core
python tests/helpers/family_page.py opt llama  these families; the other lines stay as they are
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from family_models import KNOWN, NOT_BUILT

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "families.md"
COLUMNS = {
    "losses": "label log-probabilities in padded rows, over the full vocabulary and over labels",
    "packed": "the same with several sequences per row",
    "answers": "greedy answers to prompts of different lengths, with and without a shared prefix",
    "step": "the projected gradient of a step at two probes, and answers at both",
    "rank 1": "the same with `zo.noise_rank=1`",
    "export": "transformers opens the export with exactly the expected keys and the same values",
    "LoRA": "the same for a merged adapter on all linear modules of the blocks, and peft's merge",
    "plan": "`init` writes a recipe, and `train --dry-run` plans its run and takes a few steps",
    "labels": "labels and probabilities by `predict`, also after `fit-head`",
}
"""Name of a check, which is a method of `family_checks.Family` -> what it compares."""
FAMILIES = [name for name in KNOWN if name not in NOT_BUILT]
_FAMILIES_AT_A_TIME = 8

_REASONS = """
R1  | zo.noise_rank perturbs linear layers only | Low rank supports only plain matrix products.
R3  | no transformer blocks | Its blocks have several classes.
R4  | cannot be read in slices | Its checkpoint stores weights in another order.
R5  | zo.noise_rank needs all | Low rank needs modules that run on all tokens.
R6  | peft.lora_targets | A module with a target name does not support adapters.
R7  | lacks | Its checkpoint has different names or shapes.
R8  | has an encoder | It has an encoder.
R9  | peft does not read | peft reads neither lezo_ds's adapter nor one of its own.
R10 | adds no tokens | transformers does not read the tokenizer of this check.
R11 | more than rounding | A pass of several sequences differs, so a run refuses it.
R12 | does not run in a training pass | It does not run on several sequences.
"""
REASONS = [[part.strip() for part in line.split("|")] for line in _REASONS.strip().splitlines()]
"""Of each refusal: its mark, words of its line, and what the page says."""

_HEAD = """# Families

`python tests/helpers/family_page.py` writes this page, and `make test-families` checks each line
against new results. A line is a tiny random model of a family in transformers 5.23: all families
that `AutoModelForCausalLM` opens, and some with images or audio that only
`AutoModelForMultimodalLM` opens. lezo_ds and transformers read the same directory in fp32;
transformers runs one sequence at a time. The checks are:

"""
_MARKS = """
`=`: all checks are equal within 1e-4. A line names only the checks that are not. `D` differs and
`E` ends in an error: do not use these. A run compares itself with the plain model and refuses most
of them before its first step. R is refused with a one-line error:

"""
EQUAL_MARK = "="
NOT_PACKED = "-"


def table_row(family: str, outcomes: Mapping[str, str]) -> str:
    """Return the line of a family, from what each check gave (`family_checks.outcome`)."""
    marks = {name: _mark(outcomes[name]) for name in COLUMNS}
    deviations = {name: mark for name, mark in marks.items() if mark != EQUAL_MARK}
    reasons = set(deviations.values()) - {NOT_PACKED}
    if len(deviations) == len(COLUMNS) and len(reasons) == 1:
        return f"| {family} | all: {reasons.pop()} |"
    words = [
        "not packed" if mark == NOT_PACKED else f"{name}: {mark}"
        for name, mark in deviations.items()
    ]
    return f"| {family} | {', '.join(words) or EQUAL_MARK} |"


def _mark(outcome: str) -> str:
    if outcome == "equal":
        return EQUAL_MARK
    if outcome.startswith("refused: not packed"):
        return NOT_PACKED
    if outcome.startswith("differs"):
        return "D"
    for mark, words, _ in REASONS:
        if outcome.startswith("refused") and words in outcome:
            return mark
    return "E" if outcome.startswith("error") else "R"


def _checks() -> str:
    return "".join(f"- **{name}**: {text}\n" for name, text in COLUMNS.items())


def read_rows() -> dict[str, str]:
    """Return the lines of the page, by family. Lines of other checks say nothing about these."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if f"\n\n{_checks()}\n" not in text:
        return {}
    found = (re.match(r"\| ([\w-]+) \| .+ \|", line) for line in text.splitlines())
    return {match[1]: match.string for match in found if match and match[1] in FAMILIES}


def page_text(rows: Mapping[str, str]) -> str:
    """Return the page with these lines."""
    reasons = "".join(f"- {mark}: {text}\n" for mark, _, text in REASONS)
    table = ["| family | result |", "| --- | --- |"]
    table += [rows[family] for family in FAMILIES if family in rows]
    not_built = "".join(f"- {family}: {reason}\n" for family, reason in NOT_BUILT.items())
    body = "\n".join(table)
    return f"{_HEAD}{_checks()}{_MARKS}{reasons}\n{body}\n\nNot built here:\n\n{not_built}"


def outcomes_of(family: str) -> dict[str, str]:
    """Return what each comparison gave for a family."""
    from family_checks import Family, outcome

    with tempfile.TemporaryDirectory() as directory:
        checked = Family(family, Path(directory))
        methods = {name: name.lower().replace(" ", "_") for name in COLUMNS}
        return {name: outcome(getattr(checked, method)) for name, method in methods.items()}


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
