"""A real ComfyUI server for tests: started from COMFYUI_PATH with a base folder of its own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from . import ROOT

START_S = 240


class ServerError(RuntimeError):
    """The server did not start, or a prompt failed; the message ends with the log's last lines."""


def comfyui_path() -> Path:
    """The ComfyUI folder named by COMFYUI_PATH.

    Raises:
        ServerError: the variable is not set or names no ComfyUI.
    """
    path = Path(os.environ.get("COMFYUI_PATH", ""))
    if not os.environ.get("COMFYUI_PATH") or not (path / "main.py").is_file():
        raise ServerError(f"COMFYUI_PATH is {os.environ.get('COMFYUI_PATH')!r}; set it to a folder with ComfyUI.")
    return path.resolve()


class Server:
    """One ComfyUI process whose models, outputs and custom nodes live under `base`.

    Use it as a context manager. `packs` maps folder names under custom_nodes to the folders they link to;
    the pack itself is always there, as `native-int8-dit`.
    """

    def __init__(self, base: Path, packs: dict[str, Path] | None = None, arguments: tuple[str, ...] = ()):
        self.base = Path(base)
        self.log_path = self.base / "server.log"
        self._arguments = arguments
        self._process: subprocess.Popen | None = None
        self.port = _free_port()
        for folder in ("models/diffusion_models", "models/loras", "input", "output", "temp", "user", "custom_nodes"):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        for name, target in {"native-int8-dit": ROOT, **(packs or {})}.items():
            link = self.base / "custom_nodes" / name
            if not link.exists():
                link.symlink_to(Path(target).resolve(), target_is_directory=True)

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and wait until it answers."""
        command = [
            *(sys.executable, "main.py", "--listen", "127.0.0.1", "--port", str(self.port)),
            *("--base-directory", str(self.base), "--database-url", "sqlite:///:memory:"),
            *("--disable-api-nodes", "--disable-auto-launch"),
        ]
        if not _has_cuda():
            command.append("--cpu")
        environment = dict(os.environ)
        # the interpreter is for kernel tests; a server without a GPU takes the torch implementation
        environment.pop("TRITON_INTERPRET", None)
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments], cwd=comfyui_path(), env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"ComfyUI ended with {self._process.returncode} at its start.\n{self._tail()}")
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        self.stop()
        raise ServerError(f"ComfyUI did not answer within {START_S} s.\n{self._tail()}")

    def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def get(self, path: str):
        """The JSON answer to a GET request."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict):
        """The JSON answer to a POST request; an error's text ends up in the exception."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path} answered {error.code}: {error.read().decode(errors='replace')}") from error
        return json.loads(text) if text else None

    def queue(self, prompt: dict) -> str:
        """Queue an API-format prompt and return its id."""
        return self.post("/prompt", {"prompt": prompt, "client_id": uuid.uuid4().hex})["prompt_id"]

    def wait(self, prompt_id: str, timeout_s: float = 600) -> dict:
        """Wait for a prompt and return its history entry.

        Raises:
            ServerError: the prompt failed or did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise ServerError(f"ComfyUI ended while a prompt ran.\n{self._tail()}")
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                if entry["status"]["status_str"] != "success":
                    raise ServerError(f"The prompt failed: {_failure(entry)}\n{self._tail()}")
                return entry
            time.sleep(0.2)
        raise ServerError(f"The prompt did not end within {timeout_s} s.\n{self._tail()}")

    def run(self, prompt: dict, timeout_s: float = 600) -> dict:
        """Queue a prompt, wait for it, and return its history entry."""
        return self.wait(self.queue(prompt), timeout_s)

    def log(self) -> str:
        """Everything that the process has written so far."""
        return self.log_path.read_text(errors="replace")

    def _tail(self, lines: int = 40) -> str:
        return "\n".join(self.log().splitlines()[-lines:])


def _failure(entry: dict) -> str:
    for kind, message in entry["status"].get("messages", []):
        if kind == "execution_error":
            return f"{message.get('node_type')}: {message.get('exception_message')}"
    return json.dumps(entry["status"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
