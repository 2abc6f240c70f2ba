"""Snapshots: directories in the format of transformers or peft that are either complete or absent.

    step-00000200/
        config.json, tokenizer files           copied from the base model; config.json has the dtype
        model-00001.safetensors, ..., index    weights, at most 1 GiB a file; or an adapter's file
        low_bits/model-00001.safetensors, ...  low 16 bits of trained weights, or their codes
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import CHAT_TEMPLATE_DIR

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import open_weights, persistent_buffers, saved_config
from lezo_ds.checkpoints.sharded_model import ShardedModel
from lezo_ds.distributed import gather_objects
from lezo_ds.errors import LezoError
from lezo_ds.files import (
    DAMAGE,
    failures_named,
    make_directory,
    read_regular,
    sha256_file,
    sync,
    write_atomically,
)
from lezo_ds.forward.adapters import LoraAdapter, adapter_files
from lezo_ds.sharding.shards import Shard
from lezo_ds.sharding.weights import LOW_BITS_DIRECTORY, WeightChanges

logger = logging.getLogger(__name__)

MANIFEST = "lezo_manifest.json"
README = "README.md"
MAX_FILE_BYTES = 1 << 30
"""Most bytes of a file of weights, unless a single parameter has more."""
Manifest = Mapping[str, Any]
"""What `lezo_manifest.json` has, by name."""
FileFacts = Mapping[str, Any]
"""What a manifest has of a file: `bytes` and `sha256`."""
Card = Callable[[str], str]
"""Returns the README.md of a model, from the SHA-256 of its weight files (`_weights_sha256`)."""

_NAME = re.compile(r"step-(\d{8})")
_COMPANION_SUFFIXES = {".json", ".jinja", ".md", ".model", ".txt"}  # none of weights or code


def snapshot_path(root: Path, step: int) -> Path:
    """Return the directory of the snapshot after `step` updates."""
    return root / f"step-{step:08d}"


def write_snapshot(
    sharded: ShardedModel,
    target: Path,
    facts: Manifest,
    *,
    card: Card | None,
    texts: Mapping[str, str] | None,
    merge: bool,
    changes: WeightChanges | None = None,
) -> None:
    """Write the model, or its adapter, to a directory. A collective.

    The ranks write the files of weights in turn. Each holds at most one of them (1 GiB, or one
    parameter) and the next parameter at a time. If one cannot write, every rank raises, and an
    older `target` stays as it was.

    The weights have the names and shapes that the base model's files have, such as a tensor for
    each expert.

    Args:
        sharded: with an adapter, only its parameters are written, in peft's format if peft has one.
        target: the directory, which an older snapshot or export may have.
        facts: for the manifest: `step`, the number of updates; on rank 0, `journal`, the checksum
            of the run's records after this step (see `SnapshotOwner`); and of an export, the
            `recipe` of its task. Those that are None are left out.
        card: writes the README.md of an export, which has no low bits.
        texts: the contents of files by name, which take the place of the base model's. An adapter
            has none.
        merge: whether to write the whole model with a LoRA adapter's products added to its weights.
        changes: of weights that are written with other values than they have, after a merge. The
            manifest has no digest of the weights then.

    Raises:
        LezoError: the disk is full, or does not permit writing.
    """
    weights = sharded.weights
    adapter = None if merge else sharded.adapter
    shards = weights.snapshot_shards
    all_changes = [changes] if changes else []
    if merge:
        assert isinstance(sharded.adapter, LoraAdapter)
        shards = weights.base_shards
        all_changes.insert(0, sharded.adapter.merges(weights))
    changed = set().union(*all_changes)
    # If a tied weight changes under one of its names, none of the model can be tied: BERT's head
    # has a tied bias, too.
    is_untied = any(
        len(names) > 1 and changed.intersection(names) for names in weights.aliases.values()
    )
    known = {name: value for name, value in facts.items() if value is not None}
    manifest = {**known, "base": sharded.base.fingerprint}
    if not all_changes:
        manifest["digest"] = weights.digest()
    if sharded.base.bits and adapter is not None:
        manifest["bits"] = sharded.base.bits  # with which the base has this fingerprint
    temporary = target.with_name(f".{target.name}.tmp")

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        make_directory(temporary)
        if adapter is not None:
            adapter.write_config(temporary, sharded.base.name)
            return
        _copy_companions(sharded.base.directory, temporary)
        for name, text in (texts or {}).items():
            file = temporary / name
            file.parent.mkdir(exist_ok=True)  # of chat templates with a name
            file.write_text(text, encoding="utf-8")
        _write_config(sharded, temporary, is_untied=is_untied)

    _on_rank_zero(prepare, target, temporary)
    # Each parameter is gathered when the generator gets to it, on all ranks.
    tensors: Iterator[tuple[str, Tensor]]
    if adapter is None:
        tensors = _stored_weights(sharded, shards, all_changes, is_untied=is_untied)
    else:
        tensors = ((adapter.stored_prefix + shard.name, shard.gather()) for shard in shards)
    low_tensors = (
        (shard.name, shard.gather_like(besides))
        for shard in weights.snapshot_shards
        if card is None and (besides := weights.besides_values(shard)) is not None
    )
    # A folder that the nodes do not share is there on the node of rank 0 alone.
    writers = [rank for rank, is_there in enumerate(gather_objects(temporary.is_dir())) if is_there]
    single = None if adapter is None else adapter.weights_file
    files, problem = _write_tensors(temporary, tensors, writers, single)
    low_files, low_problem = _write_tensors(temporary / LOW_BITS_DIRECTORY, low_tensors, writers)
    of_ranks = gather_objects((files | low_files, problem or low_problem))

    def publish() -> None:
        written: dict[str, FileFacts] = {}
        for files_of_rank, problem_of_rank in of_ranks:
            if problem_of_rank:
                raise OSError(problem_of_rank)
            for path, file_facts in files_of_rank.items():
                written[str(path.relative_to(temporary))] = file_facts
        _publish(temporary, target, manifest, written, card)

    _on_rank_zero(publish, target, temporary)


def _on_rank_zero(action: Callable[[], None], target: Path, temporary: Path) -> None:
    """Write something of a snapshot on rank 0. A collective. All ranks raise if it fails."""

    def guarded() -> None:
        try:
            with failures_named(target):
                action()
        except LezoError:
            shutil.rmtree(temporary, ignore_errors=True)  # it may be what filled the disk
            raise

    distributed.on_rank_zero(guarded)


def _stored_weights(
    sharded: ShardedModel,
    shards: Sequence[Shard],
    all_changes: Sequence[WeightChanges],
    *,
    is_untied: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights after some changes, and the buffers, as the base model's files have them.

    If `is_untied`, each weight comes under all its names, with the changes of each name.
    """
    for shard in shards:
        aliases = sharded.weights.aliases[shard.name]
        gathered = shard.gather()
        for names in [(alias,) for alias in aliases] if is_untied else [aliases]:
            value = gathered
            for changes in all_changes:
                if names[0] in changes:
                    value = changes[names[0]](value)
            yield from sharded.files.as_stored(names, value)
    for name, buffer in persistent_buffers(sharded.module):
        yield from sharded.files.as_stored((name,), buffer)


def _write_tensors(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    writers: Sequence[int],
    single: str | None = None,
) -> tuple[dict[Path, FileFacts], str]:
    """Write tensors to numbered safetensors files and an index, or to one file named `single`.

    All ranks go through the tensors. File i is written by rank `writers[i % len(writers)]`, while
    the tensors of the next file are gathered. A rank holds the tensors of one file at a time.

    Returns:
        What the manifest says of the files that this rank has written, and what went wrong, or "".
    """
    own_rank = distributed.rank()
    futures: dict[Path, Future[FileFacts]] = {}
    pending: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    number = 0
    num_bytes = 0  # of the present file
    total_bytes = 0
    with ThreadPoolExecutor(1) as background:

        def flush() -> None:
            if pending:
                path = directory / weight_map[next(iter(pending))]
                futures[path] = background.submit(_write_file, path, dict(pending))
                pending.clear()

        for name, tensor in tensors:
            if num_bytes and single is None and num_bytes + tensor.nbytes > MAX_FILE_BYTES:
                flush()
                number += 1
                num_bytes = 0
            weight_map[name] = single or f"model-{number + 1:05d}.safetensors"
            num_bytes += tensor.nbytes
            total_bytes += tensor.nbytes
            if writers[number % len(writers)] == own_rank:
                if not pending:
                    wait(futures.values())
                # A copy: safetensors refuses tensors that share memory.
                pending[name] = tensor.to("cpu", copy=True).contiguous()
            del tensor  # a GPU needs the memory for the next one
        flush()
    try:
        if own_rank == 0 and weight_map and single is None:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=1)
            write_atomically(directory / "model.safetensors.index.json", text)
        return {path: future.result() for path, future in futures.items()}, ""
    except (OSError, SafetensorError) as error:
        return {}, f"{error} (on rank {own_rank})"


def _write_file(path: Path, tensors: dict[str, Tensor]) -> FileFacts:
    """Write tensors as a file of safetensors, and hash it while the system has it in memory."""
    path.parent.mkdir(exist_ok=True)
    # safetensors 0.8 makes a file that only its owner can read, whatever the umask.
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
    return _file_facts(path)


def load_snapshot(sharded: ShardedModel, directory: Path) -> None:
    """Set the weights to those that `write_snapshot` wrote, bit for bit. A collective."""
    load_weights(sharded, directory)
    facts = distributed.on_rank_zero(lambda: read_facts(directory)) or {}
    digest = sharded.weights.digest()
    if digest != facts.get("digest"):
        raise LezoError(
            f"the weights in {directory} have digest {digest}, not that of the manifest, "
            f"{facts.get('digest')}; fix: move this directory elsewhere, then run the same "
            "command again"
        )


def load_weights(sharded: ShardedModel, directory: Path) -> None:
    """Set the weights to those in a snapshot or export, with the low bits if it has them."""
    adapter = sharded.adapter
    if adapter is None:
        files = open_weights(sharded.module, directory)
    else:
        files = adapter_files(adapter, directory)
    sharded.weights.load(sharded.weights.snapshot_shards, files, keeps_grids=True)


def _copy_companions(source: Path, temporary: Path) -> None:
    """Copy the texts of the base model. `_write_config` writes its config.json anew."""
    templates = source.glob(f"{CHAT_TEMPLATE_DIR}/*.jinja")
    for file in sorted([*source.iterdir(), *templates]):
        is_companion = file.suffix in _COMPANION_SUFFIXES or file.name in ("LICENSE", "NOTICE")
        is_index = ".index." in file.name or file.name == MANIFEST
        if not file.is_file() or not is_companion or is_index:
            continue
        copy = temporary / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
        if file.name.endswith("_config.json"):  # of a tokenizer, or a processor
            with suppress(*DAMAGE):
                values = json.loads(file.read_bytes())
                del values["auto_map"]  # names code, which is not copied
                copy.write_text(json.dumps(values, indent=2))


def _write_config(sharded: ShardedModel, directory: Path, *, is_untied: bool) -> None:
    """Write the config.json of the weights."""
    config = saved_config(sharded.module, sharded.base.directory)
    # from_pretrained casts the weights to the dtype in the config, so it must be that of the
    # weights.
    config["dtype"] = str(sharded.weights.shards[0].dtype).removeprefix("torch.")
    if is_untied:
        for section in (config, config.get("text_config")):
            if section is not None:
                section["tie_word_embeddings"] = False  # the head alone has changed
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _publish(
    temporary: Path,
    target: Path,
    facts: Manifest,
    written: Mapping[str, FileFacts],
    card: Card | None,
) -> None:
    """Sync all files, write the manifest, and rename the directory.

    `written` has the files that the ranks have hashed.
    """
    files = dict(written)
    for name in written:
        sync(temporary / name)  # which is an error if another node has written it elsewhere
    for path in temporary.rglob("*"):
        name = str(path.relative_to(temporary))
        if name in written:
            continue
        sync(path)  # of a folder, the names of its files
        if path.is_file():
            files[name] = _file_facts(path)
    if card is not None:
        # It may replace the README.md of the base model.
        readme = temporary / README
        readme.write_text(card(_weights_sha256(files)), encoding="utf-8")
        sync(readme)
        files[README] = _file_facts(readme)
    manifest = json.dumps({**facts, "files": files}, indent=1, sort_keys=True)
    write_atomically(temporary / MANIFEST, manifest)
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


def _file_facts(path: Path) -> FileFacts:
    """Return the size and the SHA-256 of a file, as a manifest has them."""
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
    """The run that may use a snapshot. The manifests of its snapshots have these values.

    Attributes:
        base: fingerprint of the base model.
        checksums: of the journal after 0, 1, 2, ... steps.
    """

    base: str
    checksums: Sequence[str]

    def checksum(self, step: int) -> str:
        """Return the checksum for the manifest of the snapshot after `step` updates.

        A step after the end of the journal gets the last checksum, which belongs to another step.
        """
        return self.checksums[min(step, len(self.checksums) - 1)]

    def owns(self, step: int, manifest: Manifest) -> bool:
        """Return whether a snapshot with this manifest is one of this run after `step` updates."""
        expected = {"base": self.base, "step": step, "journal": self.checksum(step)}
        return expected.items() <= manifest.items()


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a snapshot if all its files exist and have the right hash."""
    manifest = read_facts(directory)
    if manifest is None:
        return None
    problem = damage_of(directory, manifest)
    if problem:
        logger.warning("snapshot %s is ignored, because it is damaged: %s", directory, problem)
        return None
    return manifest


def damage_of(directory: Path, manifest: Manifest, suffixes: tuple[str, ...] = ("",)) -> str:
    """Return which file of a snapshot is not as its manifest has it, or "".

    Only files whose names end in one of the suffixes are read.
    """
    try:
        for name, facts in manifest["files"].items():
            path = directory / name
            if not name.endswith(suffixes):
                continue
            if not path.is_file() or facts != _file_facts(path):
                return f"{name} has changed"
    except DAMAGE as error:
        return str(error)
    return ""


def read_facts(directory: Path) -> Manifest | None:
    """Return the manifest of a snapshot without looking at its files, or None if it has none."""
    try:
        manifest = json.loads(read_regular(directory / MANIFEST))
    except DAMAGE:
        return None
    return manifest if isinstance(manifest, dict) else None


def snapshot_steps(root: Path) -> list[int]:
    """Return the steps of the snapshots in a folder, in ascending order. They may be damaged."""
    matches = [_NAME.fullmatch(path.name) for path in root.glob("step-*")]
    return sorted(int(match[1]) for match in matches if match is not None)


def own_snapshots(root: Path, owner: SnapshotOwner | None) -> tuple[dict[int, Manifest], list[int]]:
    """Return the manifests of a run's snapshots by step, and the steps of all other snapshots.

    Their files are not read. If `owner` is None, all snapshots are the run's.
    """
    own: dict[int, Manifest] = {}
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
    own, _ = own_snapshots(root, owner)
    for number in sorted(own, reverse=True):
        if number <= step and read_manifest(snapshot_path(root, number)) is not None:
            return number
    return None


def prune_snapshots(root: Path, keep: int, protected: Iterable[int]) -> None:
    """Remove unfinished snapshots, and all but the newest `keep` and those of protected steps."""
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    newest_first = snapshot_steps(root)[::-1]
    for step in set(newest_first[keep:]) - set(protected):
        shutil.rmtree(snapshot_path(root, step), ignore_errors=True)
