"""The lines of a journal, from one replica to another. They are bytes with checksums: nothing is unpickled.

Both sides prove that they know a secret by an HMAC of what they send and of a nonce of the asker.
"""

from __future__ import annotations

import hmac
import http.client
import re
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from lezo_ds.errors import LezoError

MAX_BYTES = 64 << 20
_SECONDS = 10.0
_PATH = re.compile(r"/(\d{1,9})/([0-9a-f]{8}|none)")
_PROOF, _NONCE, _START = "X-Proof", "X-Nonce", "X-Start"


class Lines(NamedTuple):
    """Whole lines of a journal from a byte: those after the asker's own, or all if it has other lines."""

    start: int
    data: bytes


class JournalTransport(ThreadingHTTPServer):
    """Serves the lines of this replica's journal at `address`, and fetches those of others."""

    def __init__(self, journal: Path, host: str, secret: bytes) -> None:
        super().__init__((host, 0), _Handler)
        self.journal, self._secret = journal, secret
        self.address = f"{host}:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fetch(self, address: str) -> Lines:
        """Return the lines of a peer that this replica lacks. OSError: nobody answers; LezoError: no peer."""
        own, nonce = whole_lines(self.journal), secrets.token_hex(16)
        path = f"/{len(own)}/{_last_crc(own)}"
        connection = http.client.HTTPConnection(address, timeout=_SECONDS)
        try:
            connection.request(
                "GET", path, headers={_NONCE: nonce, _PROOF: self.prove(nonce, path.encode())}
            )
            answer = connection.getresponse()
            data, start, proof = (
                answer.read(MAX_BYTES + 1),
                answer.headers[_START],
                answer.headers[_PROOF],
            )
        except http.client.HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        expected = self.prove(nonce, f"{start}\n".encode() + data)
        if (
            start not in ("0", str(len(own)))
            or len(data) > MAX_BYTES
            or not _equal(proof, expected)
        ):
            text = f"{address} does not send lines of a journal (status {answer.status})"
            raise LezoError(f"{text}; fix: set the same LEZO_SECRET for all replicas")
        is_behind = start == "0" and own.startswith(data)
        return Lines(len(own), b"") if is_behind else Lines(int(start), data)

    def prove(self, nonce: str, content: bytes) -> str:
        return hmac.digest(self._secret, f"{nonce}\n".encode() + content, "sha256").hex()


class _Handler(BaseHTTPRequestHandler):
    server: JournalTransport
    timeout = _SECONDS

    def do_GET(self) -> None:
        found, nonce = _PATH.fullmatch(self.path), self.headers[_NONCE] or ""
        if not found or not _equal(
            self.headers[_PROOF], self.server.prove(nonce, self.path.encode())
        ):
            self.send_error(http.client.FORBIDDEN)
            return
        data, start = whole_lines(self.server.journal), int(found[1])
        if start > len(data) or _last_crc(data[:start]) != found[2]:
            start = 0
        self.send_response(http.client.OK)
        self.send_header(_START, str(start))
        self.send_header(_PROOF, self.server.prove(nonce, f"{start}\n".encode() + data[start:]))
        self.end_headers()
        self.wfile.write(data[start:])

    def log_message(self, *_: object) -> None:
        pass


def whole_lines(path: Path) -> bytes:
    """Return the whole lines of a journal that may grow meanwhile; none if there is no file."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def _last_crc(lines: bytes) -> str:
    return lines[-11:-3].decode("ascii", "replace") if lines.endswith(b'"}\n') else "none"


def _equal(proof: str | None, expected: str) -> bool:
    return hmac.compare_digest((proof or "").encode(), expected.encode())
