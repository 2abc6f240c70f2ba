"""Snapshots: directories in the format of transformers or peft that are either complete or absent.

    step-00000200/
        config.json, tokenizer files           copied from the base model; config.json has the dtype
        model-00001.safetensors, ..., index    weights, at most 1 GiB a file; or an adapter's file
        low_bits/model-00001.safetensors, ...  low 16 bits of trained weights, with fp32_master
        README.md                              of an export
        lezo_manifest.json                     written last: step, digests, files with SHA-256

A snapshot is written to `.step-00000200.tmp`, whose rename makes it visible.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
"""Most bytes of a file of weights, unless a single parameter has more."""
Card = Callable[[str], str]
"""Returns the README.md of a model, from the SHA-256 of its weight files (`_weights_sha256`)."""

_CLOCK_TICK_NS = 2_000_000_000
"""File systems note the time of a change with this precision or better."""
_hashes: dict[tuple[int, ...], str] = {}
"""SHA-256 of files that this process has hashed, by device, inode, size and times of change."""

_NAME = re.compile(r"step-(\d{8})")
_COMPANION_SUFFIXES = {".json", ".jinja", ".md", ".model", ".txt"}  # none of weights or code


def snapshot_path(root: Path, step: int) -> Path:
    """Return the directory of the snapshot after `step` updates."""
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
    """Write the model, or its adapter, to a directory. A collective.

    Rank 0 writes. It holds at most one output file (1 GiB, or one parameter) and the next parameter
    at a time. If it cannot write, every rank raises, and an older `target` stays as it was.

    Args:
        weights: this rank's shards.
        target: the directory, which an older snapshot or export may have.
        source: directory of the base model, whose tokenizer and config are copied.
        facts: for the manifest (see `ShardedModel.write`).
        adapter: if it is not None, only its parameters are written, in peft's format if peft has
            one.
        base_model: name of the base model for the adapter's config.
        card: on rank 0, writes the README.md.
        low_bits: whether the low bits of trained weights are written, too.

    Raises:
        LezoError: the disk is full, or does not permit writing.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    attempt = _Attempt(is_wanted=distributed.rank() == 0)

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        make_directory(temporary)
        if adapter is None:
            dtype = str(weights.shards[0].dtype).removeprefix("torch.")
            _copy_companions(source, temporary, dtype)
        else:
            adapter.write_config(temporary, base_model)

    attempt.run(prepare)
    main = _TensorWriter(temporary, adapter.weights_file if adapter else None)
    prefix = adapter.stored_prefix if adapter else ""
    for shard in weights.snapshot_shards:
        attempt.run(partial(main.add, prefix + shard.name, shard.gather()))
    attempt.run(main.finish)
    low = _TensorWriter(temporary / LOW_BITS_DIRECTORY)
    if low_bits:
        for shard in weights.snapshot_shards:
            of_shard = weights.gather_low_bits(shard)
            if of_shard is not None:
                attempt.run(partial(low.add, shard.name, of_shard))
    attempt.run(low.finish)
    attempt.run(partial(_publish, temporary, target, facts, card))
    if attempt.problem:
        shutil.rmtree(temporary, ignore_errors=True)  # it may be what filled the disk
    problem = distributed.broadcast_object(attempt.problem)
    if problem:
        raise LezoError(
            f"the model cannot be written to {target}: {problem}; fix: make room on its disk, or "
            "permit writing"
        )


class _Attempt:
    """Runs actions until one fails.

    Nothing is raised, because the other ranks would then hang in the next gather.

    Attributes:
        problem: the error of the action that failed, or "".
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._goes_on = is_wanted
        self.problem = ""

    def run(self, action: Callable[[], object]) -> None:
        if not self._goes_on:
            return
        try:
            action()
        except Exception as error:  # an OSError, or a SafetensorError if the disk is full
            self._goes_on = False
            self.problem = f"{type(error).__name__}: {error}"


class _TensorWriter:
    """Writes tensors to numbered safetensors files and an index, or to one file named `single`.

    It holds those of one file at a time; huggingface_hub.save_torch_state_dict needs all tensors at
    once.
    """

    def __init__(self, directory: Path, single: str | None = None) -> None:
        self._directory = directory
        self._single = single
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the file that is filled, or to the next one if it does not fit."""
        is_full = self._pending_bytes + tensor.nbytes > MAX_FILE_BYTES
        if self._pending and is_full and self._single is None:
            self._flush()
        self._pending[name] = tensor.cpu().contiguous()
        self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file, and the index of all files."""
        if self._pending:
            self._flush()
        if self._weight_map and self._single is None:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
            path = self._directory / "model.safetensors.index.json"
            write_atomically(path, json.dumps(index, indent=1))

    def _flush(self) -> None:
        number = len(set(self._weight_map.values())) + 1
        path = self._directory / (self._single or f"model-{number:05d}.safetensors")
        path.parent.mkdir(exist_ok=True)
        # safetensors 0.8 makes a file that only its owner can read, whatever the umask.
        path.touch()
        mode = path.stat().st_mode
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(mode)
        self._weight_map.update(dict.fromkeys(self._pending, path.name))
        self._total_bytes += self._pending_bytes
        self._pending = {}
        self._pending_bytes = 0


def _copy_companions(source: Path, temporary: Path, dtype: str) -> None:
    for file in sorted(source.iterdir()):
        is_companion = file.suffix in _COMPANION_SUFFIXES or file.name in ("LICENSE", "NOTICE")
        is_index = ".index." in file.name or file.name == MANIFEST
        if file.is_file() and is_companion and not is_index:
            shutil.copyfile(file, temporary / file.name)
    # from_pretrained casts the weights to the dtype in the config, so it must be that of the
    # weights.
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older name of dtype
    (temporary / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


def _publish(temporary: Path, target: Path, facts: Mapping[str, Any], card: Card | None) -> None:
    """Sync all files, write the manifest, and rename the directory."""
    files = {}
    for path in sorted(path for path in temporary.rglob("*") if path.is_file()):
        sync(path)
        files[str(path.relative_to(temporary))] = _file_facts(path)
    if card is not None:
        # It may replace the README.md of the base model.
        readme = temporary / README
        readme.write_text(card(_weights_sha256(files)), encoding="utf-8")
        sync(readme)
        files[README] = _file_facts(readme)
    manifest = json.dumps({**facts, "files": files}, indent=1, sort_keys=True)
    write_atomically(temporary / MANIFEST, manifest)
    if (temporary / LOW_BITS_DIRECTORY).is_dir():
        sync(temporary / LOW_BITS_DIRECTORY)
    _replace_directory(temporary, target)


def _replace_directory(temporary: Path, target: Path) -> None:
    """Rename a directory to one that may exist, which is removed after the rename, not before."""
    older = target.with_name(f".{target.name}.older.tmp")
    shutil.rmtree(older, ignore_errors=True)
    if target.exists():
        target.replace(older)
    try:
        temporary.replace(target)
    except OSError:
        if older.exists():
            older.replace(target)
        raise
    sync(target.parent)
    shutil.rmtree(older, ignore_errors=True)


def _file_facts(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file, as a manifest has them.

    A file that this process has hashed is not read again (OPT-30b's snapshots have 120 GB), unless
    it has changed since, or could have changed without a new time of change.
    """
    status = path.stat()
    # Unlike the modification time, no program can set the time of the last change (ctime). It tells
    # a file from an older one whose inode number it got.
    identity = (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    sha256 = _hashes.get(identity)
    if sha256 is None:
        sha256 = sha256_file(path)
        if time.time_ns() - status.st_ctime_ns > _CLOCK_TICK_NS:
            _hashes[identity] = sha256
    return {"bytes": status.st_size, "sha256": sha256}


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
    """The run that may use a snapshot. The manifests of its snapshots have these values.

    Attributes:
        base: fingerprint of the base model.
        checksums: of the journal after 0, 1, 2, ... steps. A first-order run has one for all steps.
    """

    base: str
    checksums: Sequence[str]

    def checksum(self, step: int) -> str:
        """Return the checksum for the manifest of the snapshot after `step` updates.

        A step after the end of the journal gets the last checksum, which belongs to another step.
        """
        return self.checksums[min(step, len(self.checksums) - 1)]

    def owns(self, step: int, manifest: Mapping[str, Any]) -> bool:
        """Return whether a snapshot with this manifest is one of this run after `step` updates."""
        expected = {"base": self.base, "step": step, "journal": self.checksum(step)}
        return expected.items() <= manifest.items()


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a snapshot if all its files exist and have the right hash."""
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
    matches = [_NAME.fullmatch(path.name) for path in root.glob("step-*")]
    return sorted(int(match[1]) for match in matches if match is not None)


def own_snapshots(
    root: Path, owner: SnapshotOwner | None
) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """Return the manifests of a run's snapshots by step, and the steps of all other snapshots.

    Their files are not read. If `owner` is None, all snapshots are the run's.
    """
    own: dict[int, dict[str, Any]] = {}
    foreign: list[int] = []
    for step in snapshot_steps(root):
        manifest = read_facts(snapshot_path(root, step))
        if manifest is None:
            continue
        if owner is None or owner.owns(step, manifest):
            own[step] = manifest
        else:
            foreign.append(step)
    return own, foreign


def newest_snapshot(root: Path, step: int, owner: SnapshotOwner | None = None) -> int | None:
    """Return the step of a run's newest valid snapshot up to `step`, or None.

    If `owner` is None, the snapshots of any run count.
    """
    own, foreign = own_snapshots(root, owner)
    for number in foreign:
        logger.warning("snapshot %s belongs to another run", snapshot_path(root, number))
    return _newest_valid(root, [number for number in own if number <= step])


def _newest_valid(root: Path, steps: Iterable[int]) -> int | None:
    for step in sorted(steps, reverse=True):
        if read_manifest(snapshot_path(root, step)) is not None:
            return step
    return None


def prune_snapshots(root: Path, keep: int, protected: Iterable[int] = ()) -> None:
    """Remove all snapshots, and unfinished ones, except the newest `keep` and the protected steps.

    If none of these is valid, the newest valid one of the others also stays.
    """
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    steps = snapshot_steps(root)
    staying = {*steps[-keep:], *protected} & set(steps)
    if len(staying) < len(steps) and _newest_valid(root, staying) is None:
        newest = _newest_valid(root, steps)
        if newest is not None:
            staying.add(newest)
    remove_snapshots(root, staying)


def remove_snapshots(root: Path, protected: Iterable[int] = ()) -> None:
    """Remove all snapshots except those of the protected steps."""
    for step in set(snapshot_steps(root)) - set(protected):
        shutil.rmtree(snapshot_path(root, step), ignore_errors=True)
