"""Snapshots: directories in the format of transformers or peft that are either complete or absent."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.errors import LezoError
from lezo_ds.files import make_directory, sha256_file, sync, write_atomically
from lezo_ds.forward.adapters import Adapter
from lezo_ds.sharding.weights import ShardedWeights

logger = logging.getLogger(__name__)

MANIFEST = "lezo_manifest.json"
LOW_BITS_DIRECTORY = "low_bits"
_MAX_FILE_BYTES = 4 << 30
_NAME = re.compile(r"step-(\d{8})")
_COMPANION_SUFFIXES = {".json", ".jinja", ".md", ".model", ".txt"}
"""Suffixes of the files that are copied from the base model. None of them is for weights or code."""


def snapshot_path(root: Path, step: int) -> Path:
    """Return the directory of the snapshot taken after `step` updates."""
    return root / f"step-{step:08d}"


def write_snapshot(
    weights: ShardedWeights,
    target: Path,
    *,
    source: Path,
    facts: dict[str, Any],
    adapter: Adapter | None = None,
    base_model: str = "",
    card: str = "",
) -> None:
    """Write the model, or its adapter, to `target`. A collective: rank 0 writes.

    A model is written as a directory that `from_pretrained` opens. An adapter is written in peft's format if
    peft has one for it.

    All files go to a temporary directory and are synced. The manifest with their hashes is the last one. One
    rename makes them visible. Rank 0 holds at most one output file (4 GiB, or one parameter) at a time.

    Args:
        weights: the weights to write. Their low bits go to a folder of their own.
        target: the directory to make. It is replaced if it exists.
        source: directory of the base model. Its tokenizer is copied, and its config with the weights' dtype.
        facts: entries of the manifest in addition to the files: step, digest, base, and the journal's
            checksum (see `SnapshotOwner`).
        adapter: if it is set, only its parameters are written.
        base_model: hub id or directory of the model that the adapter belongs to.
        card: text of the README.md. If it is empty, the README.md of the base model is copied.

    Raises:
        LezoError: rank 0 cannot write. Every rank raises it.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    writes = distributed.rank() == 0
    dtype = str(weights.parameters[0].parameter.dtype).removeprefix("torch.")

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        make_directory(temporary)
        if adapter is None:
            _copy_companions(source, temporary, dtype)
        else:
            adapter.write_config(temporary, base_model)
        if card:
            (temporary / "README.md").write_text(card, encoding="utf-8")

    problem = _attempt(prepare) if writes else None
    main = _TensorWriter(temporary, writes and problem is None, adapter.weights_file if adapter else None)
    low = _TensorWriter(temporary / LOW_BITS_DIRECTORY, writes and problem is None)
    prefix = adapter.stored_prefix if adapter else ""
    for parameter in weights.stored_parameters:
        main.add(prefix + parameter.name, parameter.gather())
        low.add(parameter.name, weights.gather_low_bits(parameter))
    if writes and problem is None:
        problem = main.finish() or low.finish() or _attempt(lambda: _publish(temporary, target, facts))
    if writes and problem is not None:
        shutil.rmtree(temporary, ignore_errors=True)  # it may be what filled the disk
    problem = distributed.broadcast_object(problem)
    if problem is not None:
        raise LezoError(
            f"the model cannot be written to {target}; got: {problem}; fix: make room or permit writing"
        )


class _TensorWriter:
    """Collects tensors. Writes numbered safetensors files and an index, or one file named `single`.

    It holds the tensors of one file at a time, while huggingface_hub.save_torch_state_dict needs all tensors
    at once. An error is kept and not raised, because the other ranks would hang in the next gather.
    """

    def __init__(self, directory: Path, writes: bool, single: str | None = None) -> None:
        self._directory = directory
        self._writes = writes
        self._single = single
        self._pending: dict[str, Tensor] = {}
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0
        self._problem: str | None = None

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None or not self._writes or self._problem:
            return
        pending_bytes = sum(t.nbytes for t in self._pending.values())
        is_full = pending_bytes + tensor.nbytes > _MAX_FILE_BYTES
        if self._pending and is_full and self._single is None:
            self._flush()
        self._pending[name] = tensor.contiguous()

    def finish(self) -> str | None:
        """Write the remaining tensors and the index. Return the first error, if there is one."""
        if self._pending and not self._problem:
            self._flush()
        if self._weight_map and not self._problem and self._single is None:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
            path = self._directory / "model.safetensors.index.json"
            self._problem = _attempt(lambda: write_atomically(path, json.dumps(index, indent=1)))
        return self._problem

    def _flush(self) -> None:
        file = self._single or f"model-{len(set(self._weight_map.values())) + 1:05d}.safetensors"
        self._problem = _attempt(lambda: self._save(self._directory / file))
        self._weight_map.update(dict.fromkeys(self._pending, file))
        self._total_bytes += sum(t.nbytes for t in self._pending.values())
        self._pending = {}

    def _save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        mode = path.stat().st_mode
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors 0.8 makes a file that only its owner can read, whatever the umask


def _attempt(action: Any) -> str | None:  # noqa: ANN401
    try:
        action()
    except Exception as error:  # an OSError, or a SafetensorError if the disk is full
        return f"{type(error).__name__}: {error}"
    return None


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


def _publish(temporary: Path, target: Path, facts: dict[str, Any]) -> None:
    files = {}
    for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
        sync(path)
        files[str(path.relative_to(temporary))] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    write_atomically(temporary / MANIFEST, json.dumps({**facts, "files": files}, indent=1, sort_keys=True))
    if (temporary / LOW_BITS_DIRECTORY).is_dir():
        sync(temporary / LOW_BITS_DIRECTORY)
    if target.exists():
        shutil.rmtree(target)
    temporary.replace(target)
    sync(target.parent)


@dataclass(frozen=True)
class SnapshotOwner:
    """The run that may use a snapshot. The manifests of its snapshots have these values.

    Attributes:
        base: fingerprint of the base model.
        checksums: chained checksum of the journal after 0, 1, ... steps. A first-order run, whose records do
            not chain its steps, has one checksum for all steps.
    """

    base: str
    checksums: Sequence[str]

    def checksum(self, step: int) -> str:
        """Return the checksum for the manifest of the snapshot after `step` updates."""
        # No snapshot after the end of the journal has the last checksum, except that of the last step.
        return self.checksums[min(step, len(self.checksums) - 1)]

    def owns(self, step: int, manifest: Mapping[str, Any]) -> bool | None:
        """Return whether the snapshot after `step` updates belongs to the run.

        None means that the manifest does not say so: version 0.1.0 and early builds of 0.2.0 recorded no
        checksum.
        """
        if manifest.get("base") != self.base or manifest.get("step") != step:
            return False
        recorded = manifest.get("journal")
        return None if recorded is None else bool(recorded == self.checksum(step))


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a snapshot if it is valid, else None.

    It is valid if it lists all files of weights, and all listed files exist and have the right hash.
    """
    manifest = read_facts(directory)
    if manifest is None:
        return None
    try:
        unlisted = _weight_files(directory) - manifest["files"].keys()
        damaged = [
            name for name, facts in manifest["files"].items() if not _is_whole(directory / name, facts)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("snapshot %s is ignored, because it is damaged: %r", directory, error)
        return None
    if unlisted or damaged:
        what = f"its file {damaged[0]} is damaged" if damaged else f"its manifest lacks {min(unlisted)}"
        logger.warning("snapshot %s is ignored, because %s", directory, what)
        return None
    return manifest


def read_facts(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a snapshot without looking at its files, or None if it has none."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _weight_files(directory: Path) -> set[str]:
    """Return the files that hold a snapshot's weights and that its indices name; ValueError if none."""
    found = set(directory.rglob("*.safetensors"))
    for index in directory.rglob("*.index.json"):
        named = json.loads(index.read_text())["weight_map"].values()
        found |= {index, *(index.parent / file for file in named)}
    if not found:
        raise ValueError("it has no weights")
    return {path.relative_to(directory).as_posix() for path in found}


def _is_whole(path: Path, facts: Mapping[str, Any]) -> bool:
    return bool(path.stat().st_size == facts["bytes"] and sha256_file(path) == facts["sha256"])


def snapshot_steps(root: Path) -> list[int]:
    """Return the steps of the snapshots in a folder, in ascending order. They may be damaged."""
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)))


def newest_snapshot(root: Path, step: int, owner: SnapshotOwner | None = None) -> int | None:
    """Return the step of the newest valid snapshot up to `step`, or None if there is none.

    Args:
        root: folder of snapshots.
        step: number of updates.
        owner: the run that is going to use the snapshot; None accepts the snapshots of any run.
    """
    return _newest_valid(
        root,
        (number for number in snapshot_steps(root) if number <= step and _is_usable(root, number, owner)),
    )


def _is_usable(root: Path, step: int, owner: SnapshotOwner | None) -> bool:
    directory = snapshot_path(root, step)
    facts = read_facts(directory)
    if owner is None or facts is None:
        return facts is not None
    is_own = owner.owns(step, facts)
    if is_own is False:
        logger.warning("snapshot %s is not used, because it belongs to another run", directory)
    elif is_own is None and step > 0:
        logger.warning(
            "snapshot %s is not used, because the version that wrote it did not record to which run it "
            "belongs: the weights are replayed from the journal",
            directory,
        )
    elif is_own is None:
        # The initial values of a prefix come from a forward pass, which another machine rounds differently.
        logger.warning("snapshot %s does not say to which run it belongs, which is unchecked", directory)
        return True
    return bool(is_own)


def _newest_valid(root: Path, steps: Iterable[int]) -> int | None:
    newest_first = sorted(steps, reverse=True)
    return next((step for step in newest_first if read_manifest(snapshot_path(root, step))), None)


def prune_snapshots(root: Path, keep: int, protected: Iterable[int] = ()) -> None:
    """Remove all snapshots except the newest `keep` and the protected steps. Remove unfinished ones as well.

    If none of the snapshots that stay is valid, the newest valid one of the others also stays.
    """
    if not root.is_dir():
        return
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    steps = snapshot_steps(root)
    kept = {*steps[-keep:], *protected} & set(steps)
    unwanted = set(steps) - kept
    if unwanted and _newest_valid(root, kept) is None:
        unwanted -= {_newest_valid(root, unwanted)}
    _remove(root, unwanted)


def remove_snapshots(root: Path, protected: Iterable[int] = ()) -> None:
    """Remove all snapshots except those of the protected steps."""
    _remove(root, set(snapshot_steps(root)) - set(protected))


def _remove(root: Path, steps: Iterable[int]) -> None:
    for step in steps:
        shutil.rmtree(snapshot_path(root, step), ignore_errors=True)
