"""A run's page on 127.0.0.1, built again when the run's files have changed."""

import hashlib
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from fedbe.analysis.runs import read_groups, read_run
from fedbe.errors import FedBEError, RunError
from fedbe.experiment import comparison, run_folder
from fedbe.report.page import render
from fedbe.report.sections import build_sections

HOST = "127.0.0.1"


class Page:
    """The page of one run or comparison. It is cached until the files change."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        self._cached_version, self._html = "", ""
        self._cells = comparison.cells(folder) if comparison.is_comparison(folder) else [folder]
        for cell in self._cells:
            read_run(cell)  # a folder that is not a run is refused here, not in the browser

    def version(self) -> str:
        """A hash of the files' sizes and times: it changes when the page may have changed."""
        digest = hashlib.sha256()
        for cell in self._cells:
            for name in (run_folder.INFO_FILE, run_folder.ROUNDS_FILE):
                try:
                    stat = (cell / name).stat()
                except OSError:
                    continue
                digest.update(f"{cell}/{name} {stat.st_size} {stat.st_mtime_ns};".encode())
        return digest.hexdigest()[:16]

    def html(self) -> str:
        """The page for the current version."""
        with self._lock:
            version = self.version()
            if version != self._cached_version:
                self._html = render(build_sections(read_groups([self._folder])), version=version)
                self._cached_version = version
            return self._html


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for the page, its version and nothing else."""

    server: "_Server"
    server_version, sys_version = "fedbe", ""

    def do_GET(self) -> None:
        # DNS rebinding: another site could point its name at 127.0.0.1, so only our own names are served.
        if self.headers.get("Host", "") not in _hosts(self.server.server_port):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif self.path == "/version":
            self._send(self.server.page.version(), "text/plain")
        elif self.path == "/":
            self._page()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _page(self) -> None:
        try:
            html = self.server.page.html()
        except FedBEError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
        else:
            self._send(html, "text/html")

    def _send(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class _Server(ThreadingHTTPServer):
    """The server of one page."""

    def __init__(self, page: Page, port: int) -> None:
        self.page = page
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a closed tab is not an error
            super().handle_error(request, client_address)


def serve(page: Page, port: int) -> ThreadingHTTPServer:
    """Make a server of the page, for this machine only. Port 0 takes a free port.

    Raises:
        RunError: The port cannot be used.
    """
    try:
        return _Server(page, port)
    except OSError as error:
        raise RunError(f"cannot serve on {HOST}:{port}: {error.strerror}; choose another --port") from error


def _hosts(port: int) -> tuple[str, ...]:
    hosts = (f"{HOST}:{port}", f"localhost:{port}")
    return (*hosts, HOST, "localhost") if port == 80 else hosts  # browsers leave out the default port
