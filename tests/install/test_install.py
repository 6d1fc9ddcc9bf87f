"""The pack installed as ComfyUI-Manager does it, in folders of other names, read-only, and without Triton.

Two installations, each a real server: a git clone in a renamed folder with hyphens, and the registry's archive in a
read-only folder under an awkward path, with a Python that has no Triton.
"""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest
from packtest import ROOT, server

MODEL = "emoji_flux2_dit_bf16.safetensors"
CLONED = "ComfyUI-Native_INT8-main"
# some versions of Manager put the version behind an @; the dots are no part of a module's name
UNPACKED = "native-int8-dit@0.1.0"
# blanks and letters beyond ASCII in the path of everything; in the pack's own folder's name the host cannot serve them
PORTABLE = "ComfyUI portable größe 試"
# what the frontend makes of a folder's name when it asks for a help page
HELP_FOLDERS = {"cloned": CLONED, "unpacked": "native-int8-dit"}
FOLDERS = {"cloned": CLONED, "unpacked": UNPACKED}
PYTHON = os.environ.get("PYTHON", sys.executable)

pytestmark = pytest.mark.comfy


def git(*arguments: str, cwd: Path) -> str:
    """What git prints."""
    settings = ("-c", "user.name=Test", "-c", "user.email=test@native-int8.invalid", "-c", "core.quotepath=off")
    return subprocess.run(["git", *settings, *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A repository with one commit that holds the files of this checkout as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("needs a git checkout")
    folder = tmp_path_factory.mktemp("published") / "native-int8-dit"
    for name in filter(None, listed.stdout.split("\0")):
        # tests stay out but for their names: they are large, and what is ignored must have something to ignore
        source, target = ROOT / name, folder / name
        if not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("tests/"):
            target.touch()
        else:
            shutil.copy(source, target)
    git("init", "-q", cwd=folder)
    git("add", "-A", cwd=folder)
    git("commit", "-q", "-m", "As published", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def archive(published, tmp_path_factory) -> Path:
    """The archive that the registry would serve: tracked files without what .comfyignore names."""
    ignored = set(git("ls-files", "-ci", "--exclude-from=.comfyignore", cwd=published).splitlines())
    path = tmp_path_factory.mktemp("archive") / "node.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in git("ls-files", cwd=published).splitlines():
            if name not in ignored:
                file.write(published / name, name)
    return path


@pytest.fixture(scope="module")
def cloned(published, tmp_path_factory):
    """A server with the pack as `git clone` gives it; the host's own packs and settings, Triton if there is one."""
    base = prepared(tmp_path_factory.mktemp("cloned"))
    git("clone", "-q", str(published), str(base / "custom_nodes" / CLONED), cwd=published)
    with server.start(base, {}) as running:
        yield running


@pytest.fixture(scope="module")
def unpacked(archive, tmp_path_factory):
    """A server with the pack unpacked from the archive into a read-only folder, and no Triton."""
    base = prepared(tmp_path_factory.mktemp(PORTABLE))
    folder = base / "custom_nodes" / UNPACKED
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    python = without_triton(tmp_path_factory.mktemp("no triton"))
    with server.start(base, {}, python=python, prefix=obey_permissions(folder)) as running:
        yield running


def prepared(base: Path) -> Path:
    """A base folder with the emoji model."""
    models = base / "models" / "diffusion_models"
    models.mkdir(parents=True)
    (models / MODEL).symlink_to(ROOT / "tests" / "demo" / "data" / MODEL)
    (base / "custom_nodes").mkdir()
    return base


def without_triton(folder: Path) -> str:
    """An interpreter that has every package of PYTHON but Triton."""
    script = "import json, site, sys; print(json.dumps([p for p in sys.path if p.endswith('-packages')]))"
    found = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, check=True)
    packages = folder / "packages"
    packages.mkdir()
    for place in json.loads(found.stdout):
        for entry in Path(place).iterdir():
            link = packages / entry.name
            if not entry.name.startswith("triton") and not link.exists():
                link.symlink_to(entry)
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n", encoding="utf-8")
    python = str(folder / "venv" / "bin" / "python")
    tried = subprocess.run([python, "-c", "import torch, triton"], capture_output=True, text=True)
    assert "No module named 'triton'" in tried.stderr, tried.stderr
    return python


def obey_permissions(folder: Path) -> tuple[str, ...]:
    """What goes before a command so that it cannot write into `folder`; root can, unless it gives that up."""
    prefix = ()
    if os.geteuid() == 0:
        prefix = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all")
        if shutil.which("setpriv") is None:
            pytest.skip("as root a read-only folder needs setpriv (util-linux)")
    tried = subprocess.run([*prefix, "touch", str(folder / "written")], capture_output=True, text=True)
    assert tried.returncode, f"{folder} can be written to"
    return prefix


def pack_nodes(running) -> set[str]:
    """Ids of the pack's nodes on a server."""
    return {name for name, schema in running.object_info().items() if schema["category"] == "model/int8"}


def expected_nodes() -> set[str]:
    """Ids of the pack's nodes: each has a help page."""
    return {path.stem for path in (ROOT / "nodes" / "web" / "docs").glob("*.md")}


def complaints(running) -> list[str]:
    """Lines of the log that say something went wrong with a pack."""
    words = ("IMPORT FAILED", "Cannot import", "Traceback", "native_int8")
    return [line for line in running.log().splitlines() if any(word in line for word in words)]


def check_report(running) -> str:
    """The report of INT8 Capability Check."""
    prompt = {
        "check": {"class_type": "INT8CapabilityCheck", "inputs": {}},
        "shown": {"class_type": "PreviewAny", "inputs": {"source": ["check", 1]}},
    }
    return running.run(prompt, timeout_s=120).text("shown")


def save(running, prefix: str) -> Path:
    """Load the emoji model in INT8 and save it: the file's path."""
    prompt = {
        "load": {"class_type": "LoadDiTNativeINT8", "inputs": {"model_name": MODEL, "rotation": True}},
        "save": {
            "class_type": "INT8SaveModel",
            "inputs": {"model": ["load", 0], "filename_prefix": prefix, "loras": "refuse"},
        },
        "shown": {"class_type": "PreviewAny", "inputs": {"source": ["save", 0]}},
    }
    return Path(running.run(prompt, timeout_s=120).text("shown"))


def test_requirements_install_nothing_line_by_line(published):
    lines = [line.split("#")[0].strip() for line in (published / "requirements.txt").read_text().splitlines()]
    for line in filter(None, lines):
        pytest.fail(f"{line!r} would be installed over the host's packages")
    assert not (published / "install.py").exists() and not (published / "prestartup_script.py").exists()


@pytest.mark.parametrize("installed", FOLDERS)
def test_nodes_are_listed_and_nothing_complains(installed, request):
    running = request.getfixturevalue(installed)
    assert pack_nodes(running) == expected_nodes()
    assert complaints(running) == []


@pytest.mark.parametrize("installed", FOLDERS)
def test_help_pages_and_workflows_are_served(installed, request):
    running = request.getfixturevalue(installed)
    for node_id in expected_nodes():
        path = f"/extensions/{HELP_FOLDERS[installed]}/docs/{node_id}.md"
        with urllib.request.urlopen(running.url + path, timeout=60) as answer:
            assert answer.read().startswith(b"# ")
    names = {path.stem for path in (ROOT / "example_workflows").glob("*.json")}
    assert set(running.get("/workflow_templates")[FOLDERS[installed]]) == names


def test_report_explains_what_is_missing(unpacked):
    report = check_report(unpacked)
    assert "not faster here" in report and "No module named 'triton'" in report


def test_models_load_and_save_without_triton_in_a_read_only_folder(unpacked):
    file = save(unpacked, "without_triton")
    assert file.is_file() and file.stat().st_size > 2**20
    folder = unpacked.base_dir / "custom_nodes" / UNPACKED
    assert not list(folder.rglob("__pycache__"))


def test_a_clone_stays_as_it_was(cloned):
    assert "Machine" in check_report(cloned)
    folder = cloned.base_dir / "custom_nodes" / CLONED
    assert git("status", "--porcelain", cwd=folder) == ""


def test_other_nodes_are_as_they_are_without_the_pack(cloned, tmp_path):
    with server.start(prepared(tmp_path / "bare"), {}) as bare:
        without = bare.object_info()
    with_pack = cloned.object_info()
    assert set(with_pack) - set(without) == expected_nodes()
    changed = [name for name in without if without[name] != with_pack[name]]
    assert changed == []


@pytest.fixture(scope="module")
def comfy_cli(tmp_path_factory):
    """A function (*arguments, cwd) -> what comfy-cli prints."""
    program = os.environ.get("NATIVE_INT8_COMFY_CLI") or shutil.which("comfy")
    if not program:
        why = "needs comfy-cli: NATIVE_INT8_COMFY_CLI=$(bash .ci/comfy_cli)"
        pytest.fail(f"{why}; CI must have it") if os.environ.get("CI") == "true" else pytest.skip(why)
    home = str(tmp_path_factory.mktemp("home"))
    environment = os.environ | {"HOME": home, "XDG_CONFIG_HOME": home, "DO_NOT_TRACK": "1"}

    def call(*arguments: str, cwd: Path) -> str:
        command = [program, "--skip-prompt", "--no-json", *arguments]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def test_registry_accepts_the_metadata(comfy_cli, published):
    said = comfy_cli("node", "validate", cwd=published)
    assert "All validation checks passed" in said
    assert "warning" not in said.lower() and "error" not in said.lower(), said


def test_registry_archive_is_the_one_installed_above(comfy_cli, published, archive):
    comfy_cli("node", "pack", cwd=published)
    packed = published / "node.zip"
    try:
        with zipfile.ZipFile(packed) as theirs, zipfile.ZipFile(archive) as ours:
            assert sorted(theirs.namelist()) == sorted(ours.namelist())
    finally:
        packed.unlink()
