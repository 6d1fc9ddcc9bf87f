"""A real ComfyUI server in a folder of its own: start it, queue prompts over HTTP, read what came out.

    with server.start(base_dir, packs={"native-int8-dit": ROOT}) as comfy:
        result = comfy.wait(comfy.queue(prompt))
        result.images("9")

Needs only the standard library here; the server runs in PYTHON (or this interpreter) from COMFYUI_PATH.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("custom_nodes", "input", "output", "temp", "user", "models/diffusion_models", "models/unet", "models/loras")


class ServerError(RuntimeError):
    """The server did not start, refused a prompt, or failed while running one."""


@dataclass(frozen=True)
class Result:
    """One finished prompt: its history entry and where the server writes its files."""

    prompt_id: str
    history: dict
    output_dir: Path

    @property
    def outputs(self) -> dict:
        """node id -> what that node showed in the UI, e.g. {"9": {"images": [...]}}."""
        return self.history["outputs"]

    def files(self, node_id: str, kind: str) -> list[Path]:
        """Paths that node `node_id` lists under `kind` ("images", "latents"), in order."""
        entries = self.outputs.get(node_id, {}).get(kind, [])
        return [self.output_dir / entry["subfolder"] / entry["filename"] for entry in entries]

    def images(self, node_id: str) -> list[Path]:
        """Paths of the images that a SaveImage node wrote."""
        return self.files(node_id, "images")

    def text(self, node_id: str) -> str:
        """What a PreviewAny or text node showed, its parts joined by newlines."""
        return "\n".join(self.outputs.get(node_id, {}).get("text", []))

    @property
    def seconds(self) -> float:
        """Wall time from the start of execution to its end, by the server's own time stamps."""
        stamps = {name: data["timestamp"] for name, data in self.history["status"]["messages"] if "timestamp" in data}
        return (stamps["execution_success"] - stamps["execution_start"]) / 1000


class Server:
    """A running ComfyUI; use as a context manager, or call `stop`."""

    def __init__(self, process: subprocess.Popen, port: int, base_dir: Path):
        self.process = process
        self.base_dir = base_dir
        self.log_path = base_dir / "server.log"
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.stop()

    def log(self) -> str:
        """Everything the server printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str):
        """The JSON answer to GET `path`."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def object_info(self, node_id: str | None = None) -> dict:
        """The schema of one node, or of all: node id -> schema."""
        return self.get("/object_info" + (f"/{node_id}" if node_id else ""))

    def queue(self, prompt: Mapping) -> str:
        """Queue an API-format prompt (node id -> {"class_type", "inputs"}) and return its id.

        Raises:
            ServerError: the server finds the prompt invalid; the message holds its answer.
        """
        body = json.dumps({"prompt": prompt}).encode()
        request = urllib.request.Request(self.url + "/prompt", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["prompt_id"]
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")
            raise ServerError(f"The server refused the prompt: {detail}") from error

    def wait(self, prompt_id: str, timeout_s: float = 600) -> Result:
        """Wait until the prompt is done.

        Raises:
            ServerError: a node failed, the server ended, or `timeout_s` passed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._check_alive()
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry and entry["status"]["completed"]:
                return Result(prompt_id, entry, self.base_dir / "output")
            if entry and entry["status"]["status_str"] == "error":
                raise ServerError(_failure(entry))
            time.sleep(0.1)
        raise ServerError(f"Prompt {prompt_id} took longer than {timeout_s} s. Last lines of the log:\n{self._tail()}")

    def run(self, prompt: Mapping, timeout_s: float = 600) -> Result:
        """`wait(queue(prompt))`."""
        return self.wait(self.queue(prompt), timeout_s)

    def interrupt(self):
        """Stop the prompt that runs now, as the UI's Cancel button does."""
        request = urllib.request.Request(self.url + "/interrupt", b"{}", {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=60).close()

    def stop(self):
        """End the server and everything it started."""
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-40:])

    def _check_alive(self):
        if self.process.poll() is not None:
            raise ServerError(
                f"The server ended with {self.process.returncode}. Last lines of its log:\n{self._tail()}"
            )


def start(
    base_dir,
    packs: Mapping[str, Path],
    extra_args: Iterable[str] = (),
    timeout_s: float = 300,
    python: str | None = None,
    prefix: Iterable[str] = (),
) -> Server:
    """Start ComfyUI with `base_dir` as its base directory and wait until it answers.

    Without a CUDA device it is started with --cpu.

    Args:
        base_dir: folder for models, custom nodes, input, output and user data; made if missing.
        packs: folder name under custom_nodes -> pack folder; linked, not copied.
        extra_args: more of main.py's arguments.
        python: the interpreter, instead of PYTHON.
        prefix: a command that runs the interpreter, such as ("nice",).
    Raises:
        ServerError: COMFYUI_PATH is unset or wrong, or the server does not answer; the log's end is in the message.
    """
    comfyui = os.environ.get("COMFYUI_PATH")
    if not comfyui or not (Path(comfyui) / "main.py").is_file():
        raise ServerError(
            f"COMFYUI_PATH is {comfyui!r}; it must name a folder with ComfyUI's main.py. Use `make`, or set it."
        )
    base_dir = Path(base_dir).resolve()
    for folder in FOLDERS:
        (base_dir / folder).mkdir(parents=True, exist_ok=True)
    for name, folder in packs.items():
        link = base_dir / "custom_nodes" / name
        if not link.exists():
            link.symlink_to(Path(folder).resolve(), target_is_directory=True)
    port = _free_port()
    python = python or os.environ.get("PYTHON", sys.executable)
    command = [
        *prefix,
        python,
        "main.py",
        "--listen",
        "127.0.0.1",
        "--port",
        str(port),
        "--base-directory",
        str(base_dir),
    ]
    command += ["--disable-api-nodes", "--disable-auto-launch", "--database-url", "sqlite:///:memory:"]
    command += [] if _has_cuda(python) else ["--cpu"]
    command += list(extra_args)
    # the tests' own switch: a server must run compiled kernels, or torch's
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with open(base_dir / "server.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=comfyui, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(process, port, base_dir)
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            server._check_alive()
            with contextlib.suppress(OSError):
                server.get("/system_stats")
                return server
            time.sleep(0.3)
        raise ServerError(f"The server did not answer within {timeout_s} s. Last lines of its log:\n{server._tail()}")
    except BaseException:
        server.stop()
        raise


def _failure(entry: dict) -> str:
    for name, data in entry["status"]["messages"]:
        if name == "execution_error":
            trace = "".join(data.get("traceback", []))
            return f"Node {data['node_id']} ({data['node_type']}) failed: {data['exception_message']}\n{trace}"
        if name == "execution_interrupted":
            return f"Node {data['node_id']} ({data['node_type']}) was interrupted"
    return f"The prompt failed without a reason: {entry['status']}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _has_cuda(python: str) -> bool:
    test = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([python, "-c", test], capture_output=True).returncode == 0
