"""What the pack costs when ComfyUI starts: under a second, and no CUDA context; the same for the capability report."""

import json
import subprocess
import sys

import pytest
from packtest import ROOT

# in a process of its own, where nothing of the pack is imported yet; what the host has imported before is not counted
PROGRAM = """
import asyncio, json, sys, time
sys.path.insert(0, sys.argv[1])
import packtest
from packtest.host import import_comfy
import_comfy("comfy.sd", "comfy.utils", "comfy.quant_ops", "nodes", "comfy_api.latest")
import torch

woken, lazy_init = [], torch.cuda._lazy_init
# what creates a CUDA context, on this machine or on one with a GPU, comes through here
torch.cuda._lazy_init = lambda: (woken.append(1), lazy_init())[1]

# of the processor: another program on a busy machine is not the pack's cost
start = time.process_time()
pack = packtest.load_pack()
root_s = time.process_time() - start
extension = asyncio.run(pack.comfy_entrypoint())
nodes = asyncio.run(extension.get_node_list())
for node in nodes:
    node.define_schema()
import_s, woken_by_import = time.process_time() - start, len(woken)

start = time.process_time()
check = next(node for node in nodes if node.__name__ == "INT8CapabilityCheck")
from comfy import model_management
from native_int8.kernels.capability import detect
from native_int8.nodes.int8 import advice, surroundings
here = model_management.get_torch_device()
report = advice.report(detect(here), surroundings.look(), (), surroundings.other_gpus(here))
print(json.dumps({
    "nodes": len(nodes), "root_s": root_s, "import_s": import_s, "woken": woken_by_import,
    "report_s": time.process_time() - start, "report": report,
}))
"""


@pytest.fixture(scope="module")
def seen():
    """What one fresh process saw."""
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "tests" / "support")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.comfy
def test_import_takes_under_a_second(seen):
    assert seen["nodes"] >= 8
    assert seen["root_s"] < seen["import_s"] < 1, seen


@pytest.mark.comfy
def test_import_and_schemas_create_no_cuda_context(seen):
    assert seen["woken"] == 0


@pytest.mark.comfy
def test_the_capability_report_takes_under_a_second(seen):
    assert "What to expect" in seen["report"]
    assert seen["report_s"] < 1, seen
