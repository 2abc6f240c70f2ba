"""The table of a benchmark's results: one row per measured variant and setting, stored as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lezo_ds.errors import UserError
from lezo_ds.files import make_directory, write_atomically

COLUMNS = {
    # where the row comes from
    "measured": ("str", "step, or replay (applying recorded steps)"),
    "date": ("str", "start of the command in UTC; rows with the same date and command are one run"),
    "command": ("str", "the command line that made the row"),
    "machine": ("str", "name of the GPU, or name of the processor and number of cores"),
    "lezo_ds": ("str", "version"),
    "torch": ("str", "version"),
    "deepspeed": ("str", "version"),
    "load": ("Float64", "load average of the machine over the last minute, after the measurement"),
    # what is measured: the settings
    "model": ("str", "model of the recipe; missing for a random model of a shape"),
    "data": ("str", "where the recipe's examples come from; missing for random tokens of equal lengths"),
    "shape": ("str", "size of the random model, a key of SHAPES"),
    "layers": ("Int64", "number of transformer blocks"),
    "parameters": ("Int64", "number of weights"),
    "dtype": ("str", "of the weights: fp32, bf16 or fp16"),
    "update_precision": ("str", "how our updates are stored"),
    "ds_config": ("str", "path of the DeepSpeed JSON; missing for DeepSpeed's defaults"),
    "task": ("str", "task of the recipe, or whose typical inputs were used, apart from an explicit `length`"),
    "length": ("Int64", "tokens of an example; of a recipe, the mean over its training examples"),
    "batch": ("Int64", "examples per step, over all ranks"),
    "micro_batches": ("Int64", "number of parts that our step runs the batch in"),
    "ranks": ("Int64", "number of processes"),
    "partition_size": ("Int64", "number of ranks that share one copy of the weights; missing for all"),
    "threads": ("Int64", "CPU threads per rank"),
    # which variant
    "variant": ("str", "as on the command line, such as ours:0.75"),
    "sparsity": ("Float64", "share of the blocks that a step drops; 0 is MeZO"),
    # results: rank 0's, per step or per call unless stated otherwise
    "rounds": ("Int64", "number of timed steps or calls; for replay, of replayed steps"),
    "seconds_min": ("Float64", "shortest time until all ranks are done"),
    "seconds_median": ("Float64", "median time until all ranks are done"),
    "seconds_max": ("Float64", "longest time until all ranks are done"),
    "reference": ("str", "what `ratio` compares with: the run's first variant, or named here"),
    "ratio": (
        "Float64",
        "how many times as fast as the reference: median of the ratios in each round",
    ),
    "fed_tokens": ("Int64", "tokens, padding included, of a step's batch at one probe; mean over the steps"),
    "weight_bytes": ("Int64", "what this rank holds of the model between steps"),
    "peak_bytes": ("Int64", "peak memory of a step above what is held between steps"),
    "gathered_bytes": ("Int64", "size of the weights that this rank gathers in a step"),
}
"""Every column: its pandas dtype and its meaning. A value that does not apply to a row is missing (NA)."""


def to_frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a table with all COLUMNS; a column that a row lacks is missing there."""
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS))
    return frame.astype({name: dtype for name, (dtype, _) in COLUMNS.items()})


def append(path: Path, added: pd.DataFrame) -> None:
    """Add rows of `to_frame` to a CSV, which is created if it does not exist. Only one process may do this.

    Raises:
        UserError: the file exists and is not such a table.
        OSError: the file cannot be written.
    """
    table = pd.concat([read(path), added]) if path.exists() else added
    make_directory(path.parent)
    write_atomically(path, table.to_csv(index=False, float_format="%.6g"))


def read(path: Path) -> pd.DataFrame:
    """Read a CSV that `append` wrote; the columns are COLUMNS, in this order.

    Raises:
        UserError: there is no such file, or it is not such a table.
    """
    try:
        table = pd.read_csv(path, dtype={name: dtype for name, (dtype, _) in COLUMNS.items()})
        if list(table.columns) != list(COLUMNS):
            raise ValueError(f"columns {', '.join(table.columns)}")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a table of benchmark results",
            got=str(error),
            expected="a CSV that lezo-ds benchmark --out wrote",
            fix="give another file",
        ) from error
    return table
