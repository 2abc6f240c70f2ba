"""Uploads an exported model to a repository of the Hugging Face hub."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is documented there

from lezo_ds.errors import HubError, UserError

PACK_NAME = "run.tar.gz"
"""Name of a run's pack in a repository."""

logger = logging.getLogger(__name__)


def check_hub(repository: str) -> None:
    """Find out whether an upload can begin, before the work that it is for.

    Args:
        repository: NAME or OWNER/NAME.

    Raises:
        UserError: the name cannot be that of a repository, or there is no token.
        HubError: the hub cannot be reached, or does not know the token.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(
            "--push-to-hub names no repository", got=repository, expected="OWNER/NAME", fix="correct the name"
        ) from error
    if get_token() is None:
        raise UserError(
            "--push-to-hub needs a token of the hub, and there is none",
            expected="a token that may write, from the hub's page settings/tokens",
            fix="run `hf auth login`, or set HF_TOKEN",
        )
    with _hub_errors(f"cannot upload to {repository}"):
        HfApi().whoami()


def files_to_upload(directory: Path, pack: Path | None = None) -> Mapping[str, Path]:
    """Return the files that an upload takes, by their paths in the repository.

    Args:
        directory: an exported model: weights or an adapter, tokenizer, manifest and model card.
        pack: the pack from which it was exported; it is uploaded, too.
    """
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    files = {path.relative_to(directory).as_posix(): path for path in found}
    return files if pack is None else {**files, PACK_NAME: pack}


def push_to_hub(repository: str, files: Mapping[str, Path], *, private: bool, message: str) -> str:
    """Upload files in one commit, and return its address. The repository is made if there is none.

    Args:
        repository: NAME or OWNER/NAME.
        files: from `files_to_upload`.
        private: whether a new repository is private. One that exists stays as it is.
        message: of the commit.

    Raises:
        HubError: the hub refuses, or cannot be reached.
    """
    num_bytes = sum(file.stat().st_size for file in files.values())
    logger.info("uploading %d files, %s bytes: %s", len(files), f"{num_bytes:,}", ", ".join(files))
    operations = [CommitOperationAdd(name, file) for name, file in files.items()]
    with _hub_errors(f"cannot upload to {repository}"):
        found = HfApi().create_repo(repository, private=private, exist_ok=True)
        return HfApi().create_commit(found.repo_id, operations, commit_message=message).commit_url


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub client raises many types: offline, refused, bad name, network
        raise HubError(
            what,
            got=next((line for line in str(error).splitlines() if line.strip()), type(error).__name__),
            expected="a hub that can be reached, and a token that may write there",
            fix="check network and token (`hf auth whoami`); a model that was exported is kept, and "
            "`hf upload` takes its directory",
        ) from error
