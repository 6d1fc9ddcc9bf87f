"""The archive that the Comfy Registry serves: its metadata as ComfyUI's own parser reads it, and what stays out."""

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from packtest import ROOT

READ_WITH_COMFY = """
import json, sys
sys.path.insert(0, sys.argv[1])
from comfy_config.config_parser import extract_node_configuration
print(extract_node_configuration(sys.argv[2]).model_dump_json())
"""


def requirement_lines(name: str) -> list[str]:
    """The lines of a requirements file that install something."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.comfy
def test_comfyui_reads_the_metadata():
    command = [sys.executable, "-c", READ_WITH_COMFY, os.environ["COMFYUI_PATH"], str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read = json.loads(done.stdout.splitlines()[-1])
    project, comfy = read["project"], read["tool_comfy"]
    assert project["name"] == "native-int8-dit"
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["dependencies"] == []
    # an unknown classifier would empty these lists
    assert project["supported_accelerators"] == ["GPU :: NVIDIA CUDA"]
    assert project["supported_os"] == ["POSIX :: Linux", "Microsoft :: Windows"]
    assert project["supported_comfyui_version"] == ">=0.30.0"
    assert comfy["display_name"] == "Native INT8 DiT"
    assert comfy["publisher_id"]


def test_installs_nothing_into_the_host():
    assert requirement_lines("requirements.txt") == []


def test_licence_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "The Native INT8 DiT authors" in text


def test_archive_leaves_out_tests_and_demo_data():
    patterns = requirement_lines(".comfyignore")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    kept = [
        path
        for path in listed.stdout.splitlines()
        if not any(path.startswith(p) if p.endswith("/") else fnmatch(path, p) for p in patterns)
    ]
    assert "__init__.py" in kept
    assert "pyproject.toml" in kept
    tops = {path.split("/")[0] for path in kept}
    assert tops <= {"__init__.py", "pyproject.toml", "README.md", "LICENSE", "requirements.txt", "kernels", "nodes",
                    "example_workflows", ".comfyignore"}  # fmt: skip
    assert sum((ROOT / path).stat().st_size for path in kept if (ROOT / path).is_file()) < 5 * 2**20
