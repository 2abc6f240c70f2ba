"""The demonstration of `make replay`: fine-tuned models from their journals, without training.

It fetches the model and the sentences as `make demo` does. Then it rebuilds a model from each
journal in docs/journals, or from those that are named, and scores it on the sentences that the run
was tested on. `export` refuses weights whose digest is not that in the journal. A journal with the
name of a recipe is of that recipe; the others are of `demo`, on the sentences of their name.

    runs/replayed/NAME-HASH/    the model of NAME.lezo, of which 8 digits of a hash are HASH
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from demo import ASSETS, MODEL, make_assets

from lezo_ds.files import sha256_file

JOURNALS = Path("docs/journals")
RECIPES = Path("launch/recipes")
REPLAYED = Path("runs/replayed")


def replay(journal: Path) -> str:
    """Rebuild and score the model of a journal. Return a line with what was found."""
    began = time.monotonic()
    # Another journal of this name is another model.
    target = REPLAYED / f"{journal.stem}-{sha256_file(journal)[:8]}"
    if not target.exists():
        words = ["--journal", journal, "--step", "best", f"model.path={ASSETS / MODEL}"]
        run("export", *words, "--out", target)
    recipe = RECIPES / f"{journal.stem}.yaml"
    keys = []
    if not recipe.exists():
        recipe = RECIPES / "demo.yaml"
        keys = [f"data.path={ASSETS / journal.stem}"]
    scores = json.loads(run("evaluate", "--model", target, "--config", recipe, "--json", *keys))
    seconds = time.monotonic() - began
    return (
        f"{journal.name}: {scores['metric']} {scores['score']:.3f} on {scores['num_examples']} "
        f"examples, after {seconds:.0f} s"
    )


def run(command: str, *words: object) -> str:
    """Run a command of lezo-ds, and return what it prints; end this process if it fails."""
    arguments = [sys.executable, "-m", "lezo_ds", command, *map(str, words)]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout


def main() -> None:
    make_assets(ASSETS)
    named = [Path(word) for word in sys.argv[1:]]
    for journal in named or sorted(JOURNALS.glob("*.lezo")):
        print(replay(journal), flush=True)


if __name__ == "__main__":
    main()
