"""Packs: one small file without weights that, together with the base model, gives a run's tuned model.

A pack is a gzipped tar archive of the small files in a run directory, with pack.json first. The same run
gives the same bytes. A pack is not trusted. Unpacking takes only regular files with known names, and it
writes nothing unless every file has the hash in pack.json.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lezo_ds.config import ZEROTH_ORDER
from lezo_ds.errors import UserError
from lezo_ds.files import write_atomically
from lezo_ds.model.snapshots import MANIFEST as SNAPSHOT_MANIFEST
from lezo_ds.model.snapshots import snapshot_path, snapshot_steps
from lezo_ds.runs.restore import RecordedRun, read_run
from lezo_ds.runs.run_directory import refuse_unwritable

PACK_VERSION = 1
"""Version of the format of packs. It rises when a reader of old packs would misread new ones."""

MAX_BYTES = 256 << 20
"""Largest unpacked size in bytes. The journal of 20,000 steps takes about 8 MB."""

_CHUNK_BYTES = 1 << 20
_MANIFEST = "pack.json"
_REQUIRED = ("config.yaml", "environment.json", "journal.jsonl")
_KNOWN = (_MANIFEST, *_REQUIRED, "results.json")
_FIRST_VALUES = re.compile(
    r"snapshots/step-00000000/(lezo_manifest\.json|prefix\.safetensors|prefix_config\.json"
    r"|low_bits/(model-00001\.safetensors|model\.safetensors\.index\.json))"
)
"""The initial values of a prefix. They come from a forward pass, which another machine rounds differently."""


@dataclass(frozen=True)
class Pack:
    """The content of pack.json.

    Attributes:
        base_model: hub id or directory from which the run loaded its base model.
        model_fingerprint: digest of the base weights.
        digests: recorded digests of the tuned weights, by the number of updates as text.
        files: SHA-256 of each file, by name.
        format_version: version of the format.

    Raises:
        TypeError: a value from an untrusted pack is not text.
    """

    base_model: str
    model_fingerprint: str
    digests: dict[str, str]
    files: dict[str, str]
    format_version: int = PACK_VERSION

    def __post_init__(self) -> None:
        texts = [self.base_model, self.model_fingerprint]
        for table in (self.digests, self.files):
            texts += [*table.keys(), *table.values()] if isinstance(table, dict) else [table]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a value is not text")


def pack_run(path: Path, target: Path) -> int:
    """Pack a LeZO or MeZO run, finished or not, and return the size of the pack in bytes.

    Args:
        path: directory of the run.
        target: file to write or replace, such as run.tar.gz.

    Raises:
        UserError: there is no such run, it is not a zeroth-order run, or `target` cannot be written.
        JournalError: the journal is damaged.
    """
    run = read_run(path)
    if run.config.method not in ZEROTH_ORDER:
        raise UserError(
            f"run {path} cannot be packed",
            got=f"method {run.config.method}",
            expected="lezo or mezo, whose journal holds everything that was learned",
            fix="share the directory that launch/export.py writes",
        )
    contents = _read_files(path)
    pack = Pack(
        base_model=run.config.model.path,
        model_fingerprint=run.header.model_fingerprint,
        digests=recorded_digests(run),
        files=_hashes(contents),
    )
    text = json.dumps(asdict(pack), indent=1, sort_keys=True) + "\n"
    packed = _to_archive({_MANIFEST: text.encode(), **contents})
    with refuse_unwritable(str(target), option="--out"):
        write_atomically(target, packed)
    return len(packed)


def unpack_run(file: Path, directory: Path) -> Pack:
    """Write the files of a pack to a directory, but only if the whole pack is valid.

    Args:
        file: the pack.
        directory: existing directory to write to.

    Raises:
        UserError: the file is not a pack, is damaged, or has another format version. Nothing is written.
    """
    try:
        contents = _from_archive(file)
        values = json.loads(contents.pop(_MANIFEST, b"{}"))
        version = values.get("format_version")
        if version != PACK_VERSION:
            raise ValueError(f"format version {version!r}")
        pack = Pack(**values)
        if _hashes(contents) != pack.files or not contents.keys() >= set(_REQUIRED):
            raise ValueError("a file is missing or differs from the packed one")
        if not isinstance(json.loads(contents["environment.json"]), dict):
            raise ValueError("environment.json is not a JSON object")
    except (OSError, EOFError, zlib.error, tarfile.TarError, RecursionError) as error:
        raise _refusal(file, f"{type(error).__name__}: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise _refusal(file, str(error)) from error
    for name, content in contents.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    return pack


def recorded_digests(run: RecordedRun) -> dict[str, str]:
    """Return the digests in the results and snapshots of a zeroth-order run, by the number of updates."""
    directory, found = run.directory, {}
    for step in snapshot_steps(directory.snapshots):
        manifest = _read_json(snapshot_path(directory.snapshots, step) / SNAPSHOT_MANIFEST)
        # A snapshot of another run may have been left in this directory.
        if manifest and run.owner.owns(step, manifest) is not False:
            found[str(step)] = str(manifest["digest"])
    if results := _read_json(directory.results):
        step = results["best_step"] if results["finished"] else results["steps"]
        found[str(step)] = str(results["weights_digest"])
    return found


def _read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def _hashes(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _read_files(path: Path) -> dict[str, bytes]:
    first = snapshot_path(path / "snapshots", 0)
    found = [*(path / name for name in _KNOWN), *sorted(first.rglob("*"))]
    names = {file.relative_to(path).as_posix(): file for file in found if file.is_file()}
    missing = [name for name in _REQUIRED if name not in names]
    unknown = [name for name in names if not _is_known(name)]
    if missing or unknown:
        raise UserError(
            f"run {path} cannot be packed",
            got=f"without {', '.join(missing)}" if missing else f"unknown files: {', '.join(unknown)}",
            expected="the files that a run writes",
            fix="run the command that started the run again",
        )
    return {name: file.read_bytes() for name, file in names.items()}


def _is_known(name: str) -> bool:
    return name in _KNOWN or _FIRST_VALUES.fullmatch(name) is not None


def _to_archive(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in contents.items():
            # TarInfo's defaults, such as no owner and the year 1970, reveal nothing about this machine.
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)


def _from_archive(file: Path) -> dict[str, bytes]:
    """Return the files of an archive, by name.

    Raises:
        ValueError: the archive is too large, or a member has an unknown name or is not a regular file.
        OSError, EOFError, zlib.error, tarfile.TarError, RecursionError: the archive is malformed.
    """
    unpacked = io.BytesIO()
    with gzip.open(file) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            unpacked.write(chunk)
            if unpacked.tell() > MAX_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_BYTES} bytes")
    num_bytes = unpacked.tell()
    unpacked.seek(0)
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=unpacked, mode="r:") as archive:
        for member in archive:
            tarfile.data_filter(member, ".")
            # A sparse member can claim any size, because its holes take no space in the archive.
            is_plain = member.isreg() and not member.issparse()
            is_whole = 0 <= member.size <= num_bytes - member.offset_data
            if not (is_plain and is_whole and _is_known(member.name)) or member.name in contents:
                raise ValueError(f"unexpected member {member.name[:100]!r}")
            content = archive.extractfile(member)
            assert content is not None, "a regular file"
            contents[member.name] = content.read()
    return contents


def _refusal(file: Path, got: str) -> UserError:
    return UserError(
        f"{file} is not a valid pack",
        got=got,
        expected=f"a file that launch/pack.py wrote, with format version {PACK_VERSION}",
        fix="copy it again, or use the version of this package that wrote it",
    )
