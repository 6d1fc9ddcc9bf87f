"""The parts of tests/bench that need no GPU: which shapes are run, how results are judged, the model of consumer cards."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def bench():
    """Imports a module of the bench from its own folder."""

    def load(name):
        sys.path.insert(0, str(FOLDER))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(FOLDER))

    return load


def test_shapes_are_distinct_and_complete(bench):
    cases = bench("cases")
    chosen = cases.cases()
    assert len(chosen) == len({(c.m, c.k, c.n, c.bias) for c in chosen}) == 177
    assert sum(c.m >= cases.LARGE_M for c in chosen) == 124
    rows = [row for rows in cases.shapes().values() for row in rows]
    wanted = sum((row[column] or 0) >= 256 for row in rows for column in cases.IMAGE_COLUMNS)
    assert sum(len(c.uses) for c in chosen) == wanted
    assert max(c.m for c in cases.cases(cases.VIDEO_COLUMNS)) == 75600
    with pytest.raises(KeyError):
        cases.cases(models=("no_such_model",))


def test_the_plan_marks_block_linears_and_not_embedders(bench):
    cases = bench("cases")
    policy, formats = (importlib.import_module(f"native_int8.nodes.int8.{name}") for name in ("policy", "formats"))
    planned = cases.planned_layers(policy, formats)
    assert ("ideogram4", "layers.*.feed_forward.w2") in planned
    assert ("ideogram4", "layers.*.adaln_modulation") not in planned
    assert {model for model, _ in planned} == set(cases.shapes())


def result(times, **changes):
    """A result file of one large shape; times: contestant -> microseconds."""
    row = {
        "m": 4096, "k": 4608, "n": 4608, "bias": False, "planned": True, "users": ["ideogram4 o"], "shared_bytes": 65536,
        "wrong": [], "us": {name: [t, t, t, 20.0] for name, t in times.items()}, "left_out": {}, "rounds": 9,
    }  # fmt: skip
    return {"path": "native", "cases": [row | changes]}


TIMES = {
    "bf16": 300.0, "kitchen_cuda": 310.0, "kitchen_cuda_rot": 320.0, "ours": 185.0, "ours_rot": 190.0,
    "ours_prepared": 185.0, "ours_quantise": 20.0, "copy": 18.0,
}  # fmt: skip


def failures(summary, content):
    return {row[0] for row in summary.judge({"linear:native": content}).rows if "FAIL" in row[3]}


def test_bars_pass_and_fail(bench):
    summary = bench("summary")
    assert failures(summary, result(TIMES)) == set()
    assert failures(summary, result(TIMES | {"ours": 250.0})) == {"1"}
    assert failures(summary, result(TIMES | {"ours_rot": 200.0})) == {"1"}
    assert failures(summary, result(TIMES | {"ours_quantise": 30.0})) == {"3"}
    assert failures(summary, result(TIMES | {"ours": 310.0, "ours_rot": 310.0})) == {"1", "6"}
    assert failures(summary, result(TIMES, wrong=["output: 1 differs"])) == {"0"}
    states = {row[1]: row[3] for row in summary.judge({}).rows}
    assert set(states.values()) == {"not run"}


def test_a_text_is_made_from_files(bench, tmp_path):
    summary = bench("summary")
    path = tmp_path / "native.json"
    path.write_text(json.dumps(result(TIMES)))
    found = summary.load([str(path)])
    text = summary.text(found, summary.judge(found), None)
    assert "4096x4608x4608" in text and "**185**" in text
    with pytest.raises(SystemExit, match="second linear:native"):
        summary.load([str(path), str(path)])


def test_the_model_agrees_with_the_hand_calculation(bench):
    model_3090 = bench("model_3090")
    from native_int8 import kernels
    from native_int8.kernels import tiles

    model = model_3090.Model(model_3090.CARDS[0], kernels, tiles)
    assert model.card.int8_tops == pytest.approx(284.6, abs=0.1)
    assert model.int8_ms(4352, 4608, 13824, 0.80) == pytest.approx(2.45, rel=0.02)
    assert model.bf16_ms(4352, 4608, 13824) == pytest.approx(8.15, rel=0.02)
    assert sum(model.step(4096, "bf16, masked attention")) == pytest.approx(3290, rel=0.03)


def test_the_page_shows_the_model_of_today(bench):
    """After a change of the tile tables: python tests/bench/model_3090.py --write."""
    text = bench("model_3090").text().strip()
    assert text in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("name", ["run", "random_shapes"])
def test_programs_read_their_arguments(bench, name):
    module = bench(name)
    arguments = module.arguments_from(["--json", "x.json"])
    assert arguments.json == "x.json"
    with pytest.raises(SystemExit):
        module.arguments_from(["--no-such-option"])


def test_the_edge_shapes_run_in_the_interpreter_and_part_by_part():
    command = [sys.executable, FOLDER / "edge_shapes.py", "--quick", "--only"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "low_rank", "activations"], env=environment, capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in lines] == ["low_rank", "activations", "edge shapes on the interpreter"]
    assert lines[-1].endswith("64 comparisons of 2 parts, 0 differences")
    unknown = subprocess.run([*command, "nothing"], env=environment, capture_output=True, text=True, timeout=300)
    assert unknown.returncode == 2 and "invalid choice: 'nothing'" in unknown.stderr
