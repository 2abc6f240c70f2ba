"""Packs: one small file without weights that, together with the base model, gives a run's tuned model.

A pack is a gzipped tar archive of the small files in a run directory, with pack.json first. The same run
gives the same bytes. config.yaml and environment.json are packed without this machine's paths (see
lezo_ds.runs.sharing). The journal is packed as it is, because its checksums form a chain.

A pack is not trusted. Unpacking takes only regular files with known names, and it writes nothing unless every
file has the hash in pack.json.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import re
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from lezo_ds.config import ZEROTH_ORDER, load_yaml
from lezo_ds.errors import UserError
from lezo_ds.files import write_atomically
from lezo_ds.model.snapshots import MANIFEST as SNAPSHOT_MANIFEST
from lezo_ds.model.snapshots import snapshot_path, snapshot_steps
from lezo_ds.runs.restore import RecordedRun, read_run
from lezo_ds.runs.run_directory import refuse_unwritable
from lezo_ds.runs.sharing import private_paths, shared_config, shared_environment, shared_path

PACK_VERSION = 1
"""Version of the format of packs. It rises when a reader of old packs would misread new ones."""

MAX_BYTES = 256 << 20
"""Largest unpacked size in bytes. The journal of 20,000 steps takes about 8 MB."""

MAX_RATIO = 50
"""Largest ratio of the unpacked size to that of the pack, if it unpacks to more than 1 MiB. The keys and
checksums in a journal cannot be compressed, so a real pack stays below 20."""

_CHUNK_BYTES = 1 << 18
_MAX_TEXT_BYTES = 1 << 16
_MIN_LIMIT = 1 << 20
_END = bytes(tarfile.BLOCKSIZE)
_MANIFEST = "pack.json"
_REQUIRED = ("config.yaml", "environment.json", "journal.jsonl")
_KNOWN = (_MANIFEST, *_REQUIRED, "results.json")
_FIRST_VALUES = re.compile(
    r"snapshots/step-00000000/(lezo_manifest\.json|prefix\.safetensors|prefix_config\.json"
    r"|low_bits/(model-00001\.safetensors|model\.safetensors\.index\.json))"
)
"""The initial values of a prefix. They come from a forward pass, which another machine rounds differently."""

_MALFORMED = (
    AttributeError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    yaml.YAMLError,
)
"""What reading of a malformed JSON or YAML text raises."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pack:
    """The content of pack.json.

    Attributes:
        base_model: hub id or directory from which the run loaded its base model; see `shared_path`.
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
        UserError: there is no such run, it is not a zeroth-order run, a file of it is damaged, or `target`
            cannot be written.
        JournalError: the journal is damaged.
    """
    run = read_run(path)
    if run.config.method not in ZEROTH_ORDER:
        raise UserError(
            f"run {path} cannot be packed",
            got=f"method {run.config.method}",
            expected="lezo or mezo, whose journal holds everything that was learned",
            fix="share the directory that lezo-ds export writes",
        )
    contents = _read_files(path)
    if named := private_paths(run.header.config):
        logger.warning("warning: the journal in the pack names paths of this machine: %s", ", ".join(named))
    pack = Pack(
        base_model=shared_path(run.config.model.path),
        model_fingerprint=run.header.model_fingerprint,
        digests=recorded_digests(run),
        files=_hashes(contents),
    )
    text = json.dumps(asdict(pack), indent=1, sort_keys=True) + "\n"
    packed = _to_archive({_MANIFEST: text.encode(), **contents})
    with refuse_unwritable(str(target), option="--out"):
        write_atomically(target, packed)
    return len(packed)


def read_pack(file: Path, directory: Path, overrides: tuple[str, ...] = ()) -> tuple[RecordedRun, Pack]:
    """Unpack a run to a directory, but only if the whole pack is valid, and read it.

    Args:
        file: the pack.
        directory: existing directory to write to.
        overrides: key=value changes to the run's configuration; see `read_run`.

    Raises:
        UserError: the file is not a pack, is damaged, or has another format version. Nothing is written then.
            Or the run in it cannot be read.
        JournalError: the journal in it is damaged.
    """
    try:
        contents = _from_archive(file)
        pack = _read_manifest(contents.pop(_MANIFEST, b"{}"))
        if _hashes(contents) != pack.files or not contents.keys() >= set(_REQUIRED):
            raise ValueError("a file is missing or differs from the packed one")
        _check_texts(contents)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise _refusal(file, f"{type(error).__name__}: {error}") from error
    except _MALFORMED as error:
        raise _refusal(file, f"{type(error).__name__}: {error}") from error
    for name, content in contents.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    try:
        return read_run(directory, overrides), pack
    except _MALFORMED as error:
        raise _refusal(file, f"a journal that cannot be read ({type(error).__name__}: {error})") from error


def _read_manifest(text: bytes) -> Pack:
    values = json.loads(text)
    version = values.get("format_version")
    if version != PACK_VERSION:
        raise ValueError(f"format version {version!r}")
    return Pack(**values)


def _check_texts(contents: Mapping[str, bytes]) -> None:
    """Raise ValueError if a file for people is not what a run writes. An export reads none but the last."""
    for name in ("results.json", "config.yaml", "environment.json"):
        content = contents.get(name, b"{}")
        is_small = len(content) <= _MAX_TEXT_BYTES
        values = is_small and (load_yaml(content) if name == "config.yaml" else json.loads(content))
        if not isinstance(values, dict):
            raise ValueError(f"{name} is not what a run writes")


def recorded_digests(run: RecordedRun) -> dict[str, str]:
    """Return the digests in the results and snapshots of a zeroth-order run, by the number of updates.

    Raises:
        UserError: one of these files is damaged.
    """
    directory, found = run.directory, {}
    file = directory.results
    try:
        if file.is_file():
            results = json.loads(file.read_text())
            step = results["best_step"] if results["finished"] else results["steps"]
            found[str(step)] = str(results["weights_digest"])
        for step in snapshot_steps(directory.snapshots):
            file = snapshot_path(directory.snapshots, step) / SNAPSHOT_MANIFEST
            manifest = json.loads(file.read_text()) if file.is_file() else {}
            # A snapshot of another run may have been left in this directory.
            if manifest and run.owner.owns(step, manifest) is not False:
                found.setdefault(str(step), str(manifest["digest"]))
    except _MALFORMED as error:
        raise UserError(
            f"{file} is damaged",
            got=f"{type(error).__name__}: {error}",
            expected="what the run wrote",
            fix="run the command that started the run again",
        ) from error
    return found


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
    contents = {name: file.read_bytes() for name, file in names.items()}
    try:
        config = shared_config(load_yaml(contents["config.yaml"]))
        environment = shared_environment(json.loads(contents["environment.json"]))
    except _MALFORMED as error:
        raise UserError(
            f"run {path} cannot be packed",
            got=f"a damaged config.yaml or environment.json ({type(error).__name__}: {error})",
            expected="the files that a run writes",
            fix="run the command that started the run again",
        ) from error
    contents["config.yaml"] = yaml.safe_dump(config, sort_keys=False).encode()
    contents["environment.json"] = (json.dumps(environment, indent=1) + "\n").encode()
    return contents


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

    Only single headers are parsed. So an extended header (PAX or GNU, with sparse files or long names) is
    refused as a member of an unexpected type, before anything that it announces is read.

    Raises:
        ValueError: the archive is too large, or a member has an unknown name or is not a regular file.
        OSError, EOFError, zlib.error, tarfile.TarError: the archive is malformed.
    """
    data, start = _decompressed(file), 0
    contents: dict[str, bytes] = {}
    while (header := data[start : start + tarfile.BLOCKSIZE]) != _END:
        member = tarfile.TarInfo.frombuf(header, encoding="ascii", errors="strict")
        start += tarfile.BLOCKSIZE
        name, end = member.name, start + member.size
        is_whole_file = member.type == tarfile.REGTYPE and start <= end <= len(data)
        if not (is_whole_file and _is_known(name)) or name in contents:
            raise ValueError(f"unexpected member {name[:100]!r}")
        contents[name] = data[start:end]
        num_blocks = -(-member.size // tarfile.BLOCKSIZE)
        start += num_blocks * tarfile.BLOCKSIZE
    return contents


def _decompressed(file: Path) -> bytes:
    limit = min(MAX_BYTES, max(_MIN_LIMIT, MAX_RATIO * file.stat().st_size))
    data = bytearray()
    with gzip.open(file) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            data += chunk
            if len(data) > limit:
                raise ValueError(f"it unpacks to more than {limit} bytes")
    return bytes(data)


def _refusal(file: Path, got: str) -> UserError:
    return UserError(
        f"{file} is not a valid pack",
        got=got,
        expected=f"a file that lezo-ds pack wrote, with format version {PACK_VERSION}",
        fix="copy it again, or use the version of this package that wrote it",
    )
