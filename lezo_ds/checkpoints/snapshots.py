"""Snapshots: directories in the format of transformers or peft that are either complete or absent."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.errors import LezoError
from lezo_ds.files import DAMAGE, make_directory, sha256_file, sync, write_atomically
from lezo_ds.forward.adapters import Adapter
from lezo_ds.sharding.weights import ShardedWeights

logger = logging.getLogger(__name__)

MANIFEST = "lezo_manifest.json"
README = "README.md"
LOW_BITS_DIRECTORY = "low_bits"
MAX_FILE_BYTES = 1 << 30
Card = Callable[[str], str]
"""Returns the README.md of a model, from the SHA-256 of its weight files (`_weights_sha256`)."""

_NAME = re.compile(r"step-(\d{8})")
_COMPANION_SUFFIXES = {".json", ".jinja", ".md", ".model", ".txt"}  # none of weights or code


def snapshot_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def write_snapshot(
    weights: ShardedWeights,
    target: Path,
    source: Path,
    facts: Mapping[str, Any],
    *,
    adapter: Adapter | None = None,
    base_model: str = "",
    card: Card | None = None,
    low_bits: bool = True,
) -> None:
    """Write the model, or its adapter, to `target`. A collective: rank 0 writes, and every rank raises.

    A model is written as a directory that `from_pretrained` opens, with the tokenizer and the config of the
    base model in `source`; an adapter in peft's format, if peft has one for it; `low_bits` to a folder of
    their own. `card`, if rank 0 gives one, writes the README.md. All files go to a temporary directory and are synced; the
    manifest, with `facts` and the hashes of all files, is the last one. One rename makes them visible, or
    replaces an older `target`. Rank 0 holds at most one output file (1 GiB, or one parameter) and the next
    parameter at a time.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    dtype = str(weights.shards[0].dtype).removeprefix("torch.")
    attempt = _Attempt(is_wanted=distributed.rank() == 0)

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        make_directory(temporary)
        if adapter is None:
            _copy_companions(source, temporary, dtype)
        else:
            adapter.write_config(temporary, base_model)

    attempt.run(prepare)
    main = _TensorWriter(temporary, adapter.weights_file if adapter else None)
    prefix = adapter.stored_prefix if adapter else ""
    for shard in weights.snapshot_shards:
        full = shard.gather()
        attempt.run(lambda: main.add(prefix + shard.name, full))  # noqa: B023  (runs at once)
    attempt.run(main.finish)
    low = _TensorWriter(temporary / LOW_BITS_DIRECTORY)
    for shard in weights.snapshot_shards if low_bits else ():
        rest = weights.gather_low_bits(shard)
        if rest is not None:
            attempt.run(lambda: low.add(shard.name, rest))  # noqa: B023
    attempt.run(low.finish)
    attempt.run(lambda: _publish(temporary, target, facts, card))
    if attempt.problem:
        shutil.rmtree(temporary, ignore_errors=True)  # it may be what filled the disk
    if problem := distributed.broadcast_object(attempt.problem):
        fix = "make room on its disk, or permit writing"
        raise LezoError(f"the model cannot be written to {target}: {problem}; fix: {fix}")


class _Attempt:
    """Runs actions until one fails. Nothing is raised, or the other ranks would hang in the next gather."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._goes_on = is_wanted
        self.problem = ""

    def run(self, action: Callable[[], object]) -> None:
        if not self._goes_on:
            return
        try:
            action()
        except Exception as error:  # an OSError, or a SafetensorError if the disk is full
            self._goes_on, self.problem = False, f"{type(error).__name__}: {error}"


class _TensorWriter:
    """Writes tensors to numbered safetensors files and an index, or to one file named `single`.

    It holds those of one file at a time; huggingface_hub.save_torch_state_dict needs all tensors at once.
    """

    def __init__(self, directory: Path, single: str | None = None) -> None:
        self._directory = directory
        self._single = single
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        is_full = self._pending_bytes + tensor.nbytes > MAX_FILE_BYTES
        if self._pending and is_full and self._single is None:
            self._flush()
        self._pending[name] = tensor.cpu().contiguous()
        self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        if self._pending:
            self._flush()
        if self._weight_map and self._single is None:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
            write_atomically(
                self._directory / "model.safetensors.index.json", json.dumps(index, indent=1)
            )

    def _flush(self) -> None:
        number = len(set(self._weight_map.values())) + 1
        path = self._directory / (self._single or f"model-{number:05d}.safetensors")
        path.parent.mkdir(exist_ok=True)
        path.touch()
        mode = path.stat().st_mode
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(
            mode
        )  # safetensors 0.8 makes a file that only its owner can read, whatever the umask
        self._weight_map.update(dict.fromkeys(self._pending, path.name))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0


def _copy_companions(source: Path, temporary: Path, dtype: str) -> None:
    for file in sorted(source.iterdir()):
        is_companion = file.suffix in _COMPANION_SUFFIXES or file.name in ("LICENSE", "NOTICE")
        is_index = ".index." in file.name or file.name == MANIFEST
        if file.is_file() and is_companion and not is_index:
            shutil.copyfile(file, temporary / file.name)
    # from_pretrained casts the weights to the dtype in the config, so it must be the dtype of the weights.
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older name of dtype
    (temporary / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


def _publish(temporary: Path, target: Path, facts: Mapping[str, Any], card: Card | None) -> None:
    files = {}
    for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
        sync(path)
        files[str(path.relative_to(temporary))] = _file_facts(path)
    if card is not None:
        # It may replace the README.md of the base model.
        readme = temporary / README
        readme.write_text(card(_weights_sha256(files)), encoding="utf-8")
        sync(readme)
        files[README] = _file_facts(readme)
    write_atomically(
        temporary / MANIFEST, json.dumps({**facts, "files": files}, indent=1, sort_keys=True)
    )
    if (temporary / LOW_BITS_DIRECTORY).is_dir():
        sync(temporary / LOW_BITS_DIRECTORY)
    if target.exists():
        shutil.rmtree(target)
    temporary.replace(target)
    sync(target.parent)


def _file_facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _weights_sha256(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what `sha256sum *.safetensors | sha256sum` prints in the directory of these files."""
    digest = hashlib.sha256()
    for name in sorted(files):
        is_outside_folders = "/" not in name  # low bits are in a folder
        if is_outside_folders and name.endswith(".safetensors"):
            digest.update(f"{files[name]['sha256']}  {name}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class SnapshotOwner:
    """The run that may use a snapshot. The manifests of its snapshots have these values."""

    base: str  # fingerprint of the base model
    checksums: Sequence[
        str
    ]  # of the journal after 0, 1, ... steps; a first-order run has one for all steps

    def checksum(self, step: int) -> str:
        """Return the checksum for the manifest of the snapshot after `step` updates."""
        # No snapshot after the end of the journal has the last checksum, except that of the last step.
        return self.checksums[min(step, len(self.checksums) - 1)]

    def owns(self, step: int, manifest: Mapping[str, Any]) -> bool:
        expected = {"base": self.base, "step": step, "journal": self.checksum(step)}
        return expected.items() <= manifest.items()


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a snapshot if all files that it lists exist and have the right hash."""
    manifest = read_facts(directory)
    if manifest is None:
        return None
    try:
        for name, facts in manifest["files"].items():
            path = directory / name
            if not path.is_file() or facts != _file_facts(path):
                raise ValueError(f"{name} has changed")
    except DAMAGE as error:
        logger.warning("snapshot %s is ignored, because it is damaged: %s", directory, error)
        return None
    return manifest


def read_facts(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a snapshot without looking at its files, or None if it has none."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except DAMAGE:
        return None
    return manifest if isinstance(manifest, dict) else None


def snapshot_steps(root: Path) -> list[int]:
    """Return the steps of the snapshots in a folder, in ascending order. They may be damaged."""
    names = (path.name for path in root.glob("step-*"))
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def own_snapshots(
    root: Path, owner: SnapshotOwner | None
) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """Return the manifests of a run's snapshots (None: of any) by step, and the steps of all others."""
    found = {step: read_facts(snapshot_path(root, step)) for step in snapshot_steps(root)}
    facts = {step: manifest for step, manifest in found.items() if manifest is not None}
    own = {step: each for step, each in facts.items() if owner is None or owner.owns(step, each)}
    return own, [step for step in facts if step not in own]


def newest_snapshot(root: Path, step: int, owner: SnapshotOwner | None = None) -> int | None:
    """Return the step of the newest valid snapshot up to `step` of a run (None: of any), or None."""
    own, foreign = own_snapshots(root, owner)
    for number in foreign:
        logger.warning("snapshot %s belongs to another run", snapshot_path(root, number))
    return _newest_valid(root, [number for number in own if number <= step])


def _newest_valid(root: Path, steps: Iterable[int]) -> int | None:
    return next(
        (s for s in sorted(steps, reverse=True) if read_manifest(snapshot_path(root, s))), None
    )


def prune_snapshots(root: Path, keep: int, protected: Iterable[int] = ()) -> None:
    """Remove all snapshots, and unfinished ones, except the newest `keep` and the protected steps.

    If none of these is valid, the newest valid one of the others also stays.
    """
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    steps = snapshot_steps(root)
    kept = {*steps[-keep:], *protected} & set(steps)
    if len(kept) < len(steps) and _newest_valid(root, kept) is None:
        kept |= {step for step in [_newest_valid(root, steps)] if step is not None}
    remove_snapshots(root, kept)


def remove_snapshots(root: Path, protected: Iterable[int] = ()) -> None:
    for step in set(snapshot_steps(root)) - set(protected):
        shutil.rmtree(snapshot_path(root, step), ignore_errors=True)
