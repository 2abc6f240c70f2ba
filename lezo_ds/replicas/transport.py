"""The lines of a journal, from one replica to another.

They are bytes with checksums: nothing is unpickled. A replica says which lines it has, by their
length and their digest, and asks for those that follow:

    GET /LENGTH/DIGEST                 200
    X-Nonce: NONCE                     X-Start: LENGTH, or 0 if the peer's journal begins otherwise
    X-Proof: HMAC of NONCE and path    X-Proof: HMAC of NONCE, start and lines
                                       lines from there on

Both sides prove by an HMAC-SHA256 that they know the secret. The nonce is the asker's, so an old
answer is not taken for a new one.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import secrets
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lezo_ds.distributed.workers import Lines
from lezo_ds.errors import LezoError

NO_ANSWER = (OSError, http.client.HTTPException, ValueError, OverflowError)
"""What asking an address may raise. The last two are of an address that none can have."""
MAX_BYTES = 1 << 30
"""Most bytes that are read of an answer. A sender of more is not a peer."""
_SILENCE_SECONDS = 3.0  # after which nobody is at the other end
_PROOF = "X-Proof"
_NONCE = "X-Nonce"
_START = "X-Start"


class JournalTransport(ThreadingHTTPServer):
    """Serves the lines of this replica's journal at `address`, and fetches those of others."""

    def __init__(self, journal: Path, host: str, secret: bytes) -> None:
        super().__init__((host, 0), _Handler)
        self.journal = journal
        self.address = f"{host}:{self.server_port}"
        self._secret = secret
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fetch(self, address: str) -> Lines:
        """Return the lines that this replica lacks of the peer at HOST:PORT.

        Raises:
            OSError: nobody answers, or the answer breaks off.
            LezoError: who answers is no peer, or has another secret.
        """
        own = whole_lines(self.journal)
        path = f"/{len(own)}/{_digest(own)}"
        nonce = secrets.token_hex(16)
        proof = self.prove(nonce, path.encode())
        try:
            with closing(http.client.HTTPConnection(address, timeout=_SILENCE_SECONDS)) as link:
                link.request("GET", path, headers={_NONCE: nonce, _PROOF: proof})
                answer = link.getresponse()
                data = answer.read(MAX_BYTES + 1)
        except NO_ANSWER as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        if answer.length and len(data) <= MAX_BYTES:  # some of the announced bytes are missing
            raise ConnectionError(f"{address} has ended")
        start = answer.headers[_START] or ""
        if not _equal(answer.headers[_PROOF], self.prove(nonce, _signed(start, data))):
            raise LezoError(
                f"{address} does not send lines of a journal (status {answer.status}); "
                "fix: set the same LEZO_SECRET for all replicas"
            )
        known = own[: int(start)]
        if own.startswith(known + data):  # the peer is not ahead
            return Lines(len(own), b"")
        return Lines(len(known), data)

    def prove(self, nonce: str, content: bytes) -> str:
        """Return the proof that the sender of the content knows the secret."""
        return hmac.digest(self._secret, f"{nonce}\n".encode() + content, "sha256").hex()


class _Handler(BaseHTTPRequestHandler):
    server: JournalTransport
    timeout = 10.0

    def do_GET(self) -> None:
        nonce = self.headers[_NONCE] or ""
        if not _equal(self.headers[_PROOF], self.server.prove(nonce, self.path.encode())):
            self.send_error(http.client.FORBIDDEN)
            return
        _, length, digest = self.path.split("/")  # a peer wrote it
        data = whole_lines(self.server.journal)
        start = int(length)
        if _digest(data[:start]) != digest:  # the peer has other lines, or more of them
            start = 0
        lines = data[start:]
        self.send_response(http.client.OK)
        self.send_header("Content-Length", str(len(lines)))
        self.send_header(_START, str(start))
        self.send_header(_PROOF, self.server.prove(nonce, _signed(str(start), lines)))
        self.end_headers()
        self.wfile.write(lines)

    def log_message(self, *_: object) -> None:
        pass  # the log of the run is no log of requests


def whole_lines(path: Path) -> bytes:
    """Return the whole lines of a journal that may grow meanwhile; none if there is no file."""
    data = path.read_bytes() if path.is_file() else b""
    return data[: data.rfind(b"\n") + 1]


def _digest(lines: bytes) -> str:
    return hashlib.blake2b(lines, digest_size=16).hexdigest()


def _signed(start: str, lines: bytes) -> bytes:
    """Return the content of an answer that its proof is about."""
    return f"{start}\n".encode() + lines


def _equal(proof: str | None, expected: str) -> bool:
    return hmac.compare_digest((proof or "").encode(), expected.encode())
