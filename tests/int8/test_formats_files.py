"""Files of every maker: what the loader makes of them is what the maker means."""

import json
from collections import Counter

import pytest
import torch
from native_int8.nodes.int8 import formats, policy, quantize
from native_int8.nodes.int8.checkpoint import CheckpointError, header_of, read_header
from packtest import ROOT
from packtest.checkpoints import dequantised, floats, marker, regular_matrix
from packtest.int8_files import (
    END,
    LAYERS,
    MAKERS,
    REFUSED,
    START,
    by_rows,
    hadamard_settings,
    sylvester_matrix,
    turn,
    with_table,
)
from safetensors import safe_open
from safetensors.torch import save_file

CPU = torch.device("cpu")
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.", "model.")
ACTIONS = {"adopted": "adopt", "converted": "convert", "kept in float": "keep"}


def load(path: str, rotation: bool = True, branch: str = "auto"):
    """(decisions by layer, native tensors, notes) of a file, as the loader makes them before ComfyUI gets them."""
    header, notes = formats.choose_branch(read_header(path), branch)
    with safe_open(path, "pt") as file:

        def read(name):
            return file.get_tensor(header.key(name))

        doubts = Counter()
        specs = formats.detect(header, read, doubts)
        decisions = policy.plan(specs, rotation=rotation)
        native = {}
        for d in decisions:
            if d.is_int8:
                native.update(quantize.native_layer(d, read, CPU))
            else:
                native[f"{d.layer}.weight"] = quantize.kept_layer(d.spec, read)
    notes += [*formats.sentences(doubts), *formats.name_notes(header, specs)]
    return {d.layer: d for d in decisions}, native, notes


def difference(decision, native: dict, expected: torch.Tensor) -> float:
    """Largest |w' - w| in steps of its row, in the basis of the codes."""
    codes, scale = native[f"{decision.layer}.weight"].double(), native[f"{decision.layer}.weight_scale"].double()
    wanted = turn(expected, regular_matrix(decision.rotation_group)) if decision.rotation_group else expected
    return float((codes - wanted / scale).abs().max())


@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda p: p or "none")
@pytest.mark.parametrize("name", MAKERS)
def test_the_weights_are_what_their_maker_means(name, prefix, tmp_path):
    maker = MAKERS[name]
    tensors, metadata, written = maker.file(prefix=prefix)
    path = str(tmp_path / "model.safetensors")
    save_file(tensors, path, metadata)
    for rotation in (True, False):
        decisions, native, _ = load(path, rotation)
        assert set(decisions) == set(LAYERS)
        for layer, one in written.items():
            decision = decisions[layer]
            if not any(t.dtype in (torch.int8, torch.uint8) for t in one.tensors.values()):
                assert decision.action == "keep" and torch.equal(
                    native[f"{layer}.weight"], one.tensors[f"{layer}.weight"]
                )
                continue
            assert decision.action == ACTIONS[maker.result], decision.reason
            if decision.action == "keep":
                got = native[f"{layer}.weight"]
                assert got.dtype == torch.bfloat16
                assert ((got.double() - one.expected).abs() / one.step).max() <= 0.5
                continue
            got, scale = native[f"{layer}.weight"], native[f"{layer}.weight_scale"]
            assert got.dtype == torch.int8 and got.shape == one.expected.shape and scale.dtype == torch.float32
            if decision.action == "adopt":
                column = scale.reshape(-1, 1).expand(len(got), 1)
                assert torch.equal(dequantised(got, column, decision.rotation_group), one.expected)
            else:
                assert bool(decision.rotation_group) == (rotation and got.shape[1] % 16 == 0)
                # float32 arithmetic moves a value that lies between two steps by far less than a hundredth of one
                assert difference(decision, native, one.expected) <= 0.505


def test_a_wrong_meaning_would_show():
    """The bar above bites: the same codes read without their rotation, matrix or smoothing are many steps away."""
    for name in ("sylvester", "toolkit-hadanorm", "ideogram-smooth", "sdnq-zero", "blocks-64"):
        maker = MAKERS[name]
        one = maker.write(LAYERS[0], floats(*maker.shape))
        plain = next(v for k, v in one.tensors.items() if v.dtype == torch.int8).double() * one.step
        assert ((plain - one.expected).abs() / one.step).max() > 2, name


@pytest.mark.parametrize("branch", ["conditional", "unconditional"])
def test_a_branch_is_picked_by_name(branch, tmp_path):
    tensors, _, _ = MAKERS["ideogram"].file()
    path = str(tmp_path / "model.safetensors")
    save_file(tensors, path)
    _, native, notes = load(path, branch=branch)
    assert torch.equal(native[f"{LAYERS[0]}.weight"], tensors[f"{branch}.{LAYERS[0]}.wq"])
    other = "unconditional" if branch == "conditional" else "conditional"
    assert any(f"the {branch} one was loaded" in note and f"branch {other}" in note for note in notes)
    one = {key: value for key, value in tensors.items() if key.startswith(branch)}
    save_file(one, path)
    _, native, notes = load(path)
    assert torch.equal(native[f"{LAYERS[0]}.weight"], tensors[f"{branch}.{LAYERS[0]}.wq"]) and not notes
    with pytest.raises(CheckpointError, match=f"holds the {branch} branch only"):
        load(path, branch=other)


def test_a_branch_of_a_file_without_branches_stops(tmp_path):
    path = str(tmp_path / "model.safetensors")
    save_file(MAKERS["native"].file()[0], path)
    with pytest.raises(CheckpointError, match="no unconditional branch"):
        load(path, branch="unconditional")


@pytest.mark.parametrize("family, how, tensors, said", REFUSED, ids=[f"{f}-{i}" for i, (f, *_) in enumerate(REFUSED)])
@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda p: p or "none")
def test_a_relative_is_refused_by_name(family, how, tensors, said, prefix, tmp_path):
    path = str(tmp_path / "model.safetensors")
    save_file({f"{prefix}{LAYERS[0]}{key}": value.clone() for key, value in tensors.items()}, path)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    for part in (path, f"{prefix}{LAYERS[0]}.", said, "use " if "layout" not in said else "save "):
        assert part in str(caught.value)


def detect(tensors, metadata=None, source="model"):
    header = header_of(tensors, metadata, source)
    doubts = Counter()
    specs = formats.detect(header, lambda name: tensors[header.key(name)], doubts)
    return specs, [*formats.sentences(doubts), *formats.name_notes(header, specs)]


@pytest.mark.parametrize("shape", [(3, 5), (2, 3), (4, 4), (2, 4, 1)], ids=str)
def test_blocks_that_do_not_fit_stop_with_both_counts(shape):
    tensors = MAKERS["blocks-128"].file((LAYERS[0],))[0]
    tensors[f"{LAYERS[0]}.weight_scale"] = torch.ones(shape)
    with pytest.raises(CheckpointError) as caught:
        detect(tensors)
    count = torch.Size(shape).numel()
    assert f"{count} scales" in str(caught.value) and any(n in str(caught.value) for n in ("= 8 scales", "256 scales"))


@pytest.mark.parametrize(
    "name, key, value, said",
    [
        ("toolkit-quarot", "quarot_hadamard", torch.ones(128, 127), r"\[128, 128\] is needed"),
        ("toolkit-quarot", "quarot_hadamard", torch.ones(96, 96), "divides the columns"),
        ("toolkit-quarot", "quarot_hadamard", torch.ones(128, 128), "no rotation"),
        ("toolkit-hadanorm", "hadanorm_sigma", torch.ones(255), r"\[255\]"),
        ("toolkit-hadanorm", "hadanorm_sigma", torch.zeros(256), "zeros"),
        ("sdnq-zero", "zero_point", torch.ones(23, 1), r"\[23, 1\]"),
        ("sdnq-svd", "svd_up", torch.ones(24, 5), r"svd_up"),
        ("sdnq-svd", "scale", torch.full((24, 1), float("nan")), "NaN or Inf"),
        ("sdnq-groups", "scale", torch.ones(24, 3, 1), r"\[24, 4, 1\]"),
        ("bitsandbytes", "SCB", torch.ones(23), "23 scales"),
        ("quanto", "weight._scale", torch.ones(25, 1), "25 scales"),
        ("modelopt", "weight_scale", torch.full((24, 1), float("inf")), "NaN or Inf"),
        ("lightx2v", "weight_scale", torch.ones(24, 1, dtype=torch.int32), "float scale"),
    ],
)
def test_a_damaged_part_stops_and_is_named(name, key, value, said, tmp_path):
    tensors = MAKERS[name].file()[0]
    tensors[f"{LAYERS[0]}.{key}"] = value
    path = str(tmp_path / "model.safetensors")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=said):
        load(path)


@pytest.mark.parametrize("name", ["sdnq-svd", "ideogram", "quanto", "bitsandbytes", "alias"])
def test_a_lost_scale_stops_and_names_the_weight(name):
    tensors = MAKERS[name].file()[0]
    lost = next(k for k in tensors if LAYERS[0] in k and k.endswith((".scale", ".ws", "._scale", ".SCB")))
    with pytest.raises(CheckpointError, match=r"without a scale|a storage this loader does not know"):
        branches = {key: value for key, value in tensors.items() if key != lost}
        header, _ = formats.choose_branch(header_of(branches))
        formats.detect(header, lambda key: branches[header.key(key)])


def test_a_name_that_says_convrot_is_doubted():
    tensors = MAKERS["native-tensor"].file()[0]
    _, notes = detect(tensors, source="folder/klein-9b-ConvRot-int8.safetensors")
    assert any("says ConvRot and no layer" in note for note in notes)
    for name, source in (("native-mixed", "x-convrot.safetensors"), ("native", "x.safetensors")):
        assert not detect(MAKERS[name].file()[0], source=source)[1]


def test_settled_doubts_are_told_once_per_kind():
    tensors = MAKERS["lightx2v"].file()[0]
    for layer in LAYERS:
        tensors[f"{layer}.comfy_quant"] = marker({"format": "float8_e4m3fn"})
    specs, notes = detect(tensors)
    assert len(notes) == 1 and "marked as float8_e4m3fn" in notes[0] and "2 layers" in notes[0]
    assert all(s.kind == "int8" for s in specs.values())
    tensors = MAKERS["native"].file()[0]
    tensors[f"{LAYERS[0]}.comfy_quant"] = marker(b"{broken")
    assert ["marker that cannot be read" in note for note in detect(tensors)[1]] == [True]
    assert len(detect(MAKERS["native"].file()[0], {"_quantization_metadata": "no {"})[1]) == 1


def heavy_tailed(rows: int, columns: int, seed: int, freedom: float = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    chi = torch.randn(rows, columns, int(freedom), generator=generator).square().sum(-1)
    return normal * (freedom / chi).sqrt() * 0.02


@pytest.mark.parametrize("stored, said", [(256, 0), (0, 256), (256, 256), (0, 0)])
def test_a_wrong_rotation_flag_of_many_layers_is_doubted_and_believed(stored, said):
    fields = {"format": "int8_tensorwise"} | ({"convrot": True, "convrot_groupsize": said} if said else {})
    tensors = {}
    for i in range(10):
        one = by_rows(fields, stored)(f"blocks.{i}.ff", heavy_tailed(64, 512, i))
        tensors.update(one.tensors)
    specs, _ = detect(tensors)
    notes = formats.rotation_notes(specs, tensors.__getitem__)
    assert len(notes) == (stored != said)
    assert all(s.rotation_group == said for s in specs.values())
    few = dict(list(specs.items())[:7])
    assert not formats.rotation_notes(few, tensors.__getitem__)


def test_normal_weights_give_no_doubt():
    tensors = {}
    for i in range(10):
        tensors.update(by_rows(None)(f"blocks.{i}.ff", floats(64, 512, seed=i)).tensors)
    assert not formats.rotation_notes(detect(tensors)[0], tensors.__getitem__)


@pytest.mark.parametrize("name", ["quantization_config.json", "config.json", None])
def test_sdnqs_rotation_is_seen_in_its_settings(name, tmp_path):
    path = str(tmp_path / "model.safetensors")
    tensors = MAKERS["sdnq"].file()[0]
    for use in (False, True):
        settings = json.dumps({"weights_dtype": "int8", "use_hadamard": use})
        if name == "config.json":
            settings = f'{{"quantization_config": {settings}}}'
        save_file(tensors, path, None if name else {"quantization_config": settings})
        if name:
            (tmp_path / name).write_text(settings)
        if use:
            with pytest.raises(CheckpointError, match="use_hadamard"):
                load(path)
        else:
            load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sdnq_version": "0.2.0"}, r"groups of 64 and sdnq_version 0\.2\.0, whose matrix was one or the other"),
        ({"sdnq_version": None}, "no sdnq_version"),
        ({"sdnq_version": "newest"}, "no sdnq_version"),
        ({"hadamard_group_size": 96}, "hadamard_group_size 96"),
        ({"hadamard_group_size": True}, "hadamard_group_size True"),
        ({"hadamard_group_size": None}, "hadamard_group_size None"),
        ({"modules_quant_config": {"blocks.0": {"use_hadamard": False}}}, "settings for single layers"),
    ],
)
def test_a_rotation_of_sdnq_that_is_not_told_is_refused(changes, words, tmp_path):
    maker = MAKERS["sdnq-hadamard-narrow"]
    tensors, metadata, _ = maker.file()
    settings = {**json.loads(metadata["quantization_config"]), **changes}
    path = str(tmp_path / "model.safetensors")
    save_file(tensors, path, {"quantization_config": json.dumps(settings)})
    with pytest.raises(CheckpointError, match=words):
        load(path)


@pytest.mark.parametrize(("columns", "most", "group"), [(96, 256, 32), (64, 16, 16), (4096, 4096, 4096), (6, 256, 0)])
def test_sdnqs_group_is_the_largest_that_divides_the_columns(columns, most, group, tmp_path):
    tensors = MAKERS["sdnq"].write("a", floats(8, columns)).tensors
    path = str(tmp_path / "model.safetensors")
    save_file(tensors, path, hadamard_settings("0.2.4", most))
    header = read_header(path)
    spec = formats.detect(header, tensors.__getitem__)["a"]
    assert (spec.rotation_group, spec.sylvester) == (group, group == 32)
    assert bool(spec.convert) == (group in (32, 4096))


def test_a_convolution_with_one_scale_is_kept():
    codes = torch.arange(-108, 108).reshape(8, 3, 3, 3).clamp(-128, 127).to(torch.int8)
    tensors = {"in.weight": codes, "in.weight_scale": torch.tensor(0.5), "in.comfy_quant": marker(b"int8_tensorwise")}
    specs, _ = detect(tensors)
    assert [d.action for d in policy.plan(specs)] == ["keep"]
    assert torch.equal(quantize.kept_layer(specs["in"], tensors.__getitem__).float(), codes.float() * 0.5)


def test_sylvester_is_not_convrot():
    from native_int8.nodes.int8.formats.dequantise import sylvester

    for size in (8, 128, 512):
        assert torch.allclose(sylvester(size, CPU).double(), sylvester_matrix(size), atol=1e-7)
    assert not torch.allclose(sylvester_matrix(64), regular_matrix(64))


def test_the_readmes_table_is_current():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count(START) == text.count(END) == 1
    assert with_table(text) == text, "run PYTHONPATH=tests/support python -m packtest.int8_files"
