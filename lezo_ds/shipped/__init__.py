"""Files that this project ships in addition to its code: `launch` and `ds_configs`.

They have the same relative names in a clone and in an installed package: setup.py maps the two folders from
the root of the clone into this folder of the wheel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
ROOT = _HERE if (_HERE / "ds_configs").is_dir() else _HERE.parents[1]
"""The directory that holds `launch` and `ds_configs`: this package in a wheel, else the root of the clone."""

TRAIN = ROOT / "launch" / "train.py"
"""The script that starts one rank, which launchers take."""


def find_file(name: str) -> Path:
    """Return a file by its path, or a shipped file by its relative name.

    Args:
        name: such as `ds_configs/zero3_bf16.json`. The working directory comes first, then the shipped files.

    Returns:
        The path of the file; the path `name` as it is if there is no such file in either place.

    >>> find_file("ds_configs/zero3_bf16.json").is_file()
    True
    """
    path = Path(name)
    shipped = ROOT / path
    return shipped if not path.exists() and not path.is_absolute() and shipped.exists() else path


def deepspeed_command(num_ranks: int, options: Sequence[str] = ()) -> list[str]:
    """Return the words that start `lezo-ds train` on several ranks; its arguments follow.

    In the root of a clone they name the script, and elsewhere the package, which must then be installed.

    Args:
        num_ranks: number of ranks on this machine, at least 1.
        options: more options of DeepSpeed's launcher.
    """
    is_root = Path("launch/train.py").is_file()
    program = ["launch/train.py"] if is_root else ["--module", "lezo_ds", "train"]
    return ["deepspeed", "--num_gpus", str(num_ranks), *options, *program]
