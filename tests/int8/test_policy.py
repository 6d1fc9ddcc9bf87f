import logging

import pytest
from native_int8.nodes.int8 import policy
from native_int8.nodes.int8.formats import LayerSpec

# layer, N, K, taken: the kinds of Linears of published models, with their sizes
MODELS = {
    "ideogram4": [
        ("layers.{}.attention.qkv", 13824, 4608, True),
        ("layers.{}.attention.o", 4608, 4608, True),
        ("layers.{}.feed_forward.w2", 4608, 12288, True),
        ("layers.{}.adaln_modulation", 18432, 512, False),
        ("llm_cond_proj", 4608, 53248, True),
        ("t_embedding.mlp_in", 4608, 4608, False),
        ("adaln_proj", 512, 4608, False),
        ("final_layer.adaln_modulation", 4608, 512, False),
    ],
    "flux1": [
        ("double_blocks.{}.img_attn.qkv", 9216, 3072, True),
        ("double_blocks.{}.img_mlp.0", 12288, 3072, True),
        ("double_blocks.{}.txt_mlp.2", 3072, 12288, True),
        ("single_blocks.{}.linear2", 3072, 15360, True),
        ("double_blocks.{}.img_mod.lin", 18432, 3072, False),
        ("single_blocks.{}.modulation.lin", 9216, 3072, False),
        ("time_in.in_layer", 3072, 256, False),
        ("guidance_in.out_layer", 3072, 3072, False),
        ("txt_in", 3072, 4096, False),
        ("final_layer.linear", 64, 3072, False),
        ("final_layer.adaLN_modulation.1", 6144, 3072, False),
    ],
    "z_image": [
        ("layers.{}.attention.out", 3840, 3840, True),
        ("noise_refiner.{}.feed_forward.w1", 10240, 3840, True),
        ("context_refiner.{}.attention.qkv", 11520, 3840, True),
        ("layers.{}.adaLN_modulation.0", 15360, 256, False),
        ("t_embedder.mlp.2", 256, 1024, False),
        ("cap_embedder.1", 3840, 2560, False),
    ],
    "qwen_image": [
        ("transformer_blocks.{}.img_mlp.net.0.proj", 12288, 3072, True),
        ("transformer_blocks.{}.attn.add_q_proj", 3072, 3072, True),
        ("transformer_blocks.{}.attn.to_out.0", 3072, 3072, True),
        ("transformer_blocks.{}.img_mod.1", 18432, 3072, False),
        ("time_text_embed.timestep_embedder.linear_2", 3072, 3072, False),
        ("norm_out.linear", 6144, 3072, False),
    ],
    "wan": [
        ("blocks.{}.self_attn.q", 5120, 5120, True),
        ("blocks.{}.ffn.2", 5120, 13824, True),
        ("text_embedding.2", 5120, 5120, False),
        ("time_projection.1", 30720, 5120, False),
        ("head.head", 64, 5120, False),
    ],
    "chroma": [
        ("double_blocks.{}.img_mlp.0", 12288, 3072, True),
        ("distilled_guidance_layer.layers.{}.in_layer", 5120, 5120, False),
    ],
    "krea2": [
        ("blocks.{}.mlp.gate", 16384, 6144, True),
        ("blocks.{}.attn.gate", 6144, 6144, True),
        ("txtfusion.refiner_blocks.{}.mlp.up", 6912, 2560, False),
        ("tproj.1", 36864, 6144, False),
    ],
    "ltx2": [
        ("transformer_blocks.{}.audio_to_video_attn.to_out.0", 4096, 2048, True),
        ("transformer_blocks.{}.ff.net.2", 4096, 16384, True),
        ("adaln_single.emb.timestep_embedder.linear_2", 4096, 4096, False),
        ("audio_embeddings_connector.transformer_1d_blocks.{}.attn1.to_q", 3840, 3840, False),
        ("caption_projection.linear_2", 4096, 4096, False),
    ],
}


def floats(*layers: tuple, kind: str = "float") -> dict[str, LayerSpec]:
    return {
        name: LayerSpec(kind, "bf16", "BF16", shape, f"{name}.weight")
        for name, *shape in layers
        for shape in [tuple(shape)]
    }


def one(name: str, *shape: int, **options):
    return policy.plan(floats((name, *shape)), **options)[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_takes_the_block_linears_of_published_models(model, blocks):
    layers = [(name.format(i), n, k) for name, n, k, _ in MODELS[model] for i in range(blocks if "{}" in name else 1)]
    expected = {name.format(i): taken for name, _, _, taken in MODELS[model] for i in range(blocks)}
    got = {d.layer: d.action == "quantise" for d in policy.plan(floats(*layers))}
    assert got == {name: expected[name] for name in got}


@pytest.mark.parametrize(
    "n, k, said",
    [
        (256, 8, "multiple of 16"),
        (256, 33, "multiple of 16"),
        (256, 96, "below 256"),
        (252, 256, "multiple of 8"),
        (248, 256, "below 256"),
    ],
)
def test_small_and_odd_sizes_stay_float_with_a_reason(n, k, said):
    decision = one("blocks.0.attn.q", n, k)
    assert decision.action == "keep" and said in decision.reason


def test_every_decision_has_a_reason():
    layers = [(name.format(0), n, k) for rows in MODELS.values() for name, n, k, _ in rows]
    assert all(decision.reason for decision in policy.plan(floats(*layers)))


def test_tables_and_convolutions_are_no_linears():
    specs = floats(("blocks.0.rel_pos_embed", 512, 256), ("blocks.0.conv", 256, 256, 3, 3), ("blocks.0.norm", 256))
    assert [(d.layer, d.action) for d in policy.plan(specs)] == [
        ("blocks.0.rel_pos_embed", "keep"),
        ("blocks.0.conv", "keep"),
    ]


def test_a_sequential_outside_the_blocks_is_no_block():
    assert one("caption.net.0.proj", 512, 512).reason == "outside the repeated blocks"


@pytest.mark.parametrize(
    "k, group", [(256, 256), (12288, 256), (960, 64), (336, 16), (3360, 16), (1536, 256), (5376, 256)]
)
def test_rotates_by_the_largest_group_that_divides_k(k, group):
    assert one("blocks.0.attn.q", 256, k).rotation_group == group
    assert one("blocks.0.attn.q", 256, k, rotation=False).rotation_group == 0


def test_no_group_for_other_widths():
    assert [policy.rotation_group(k) for k in (96, 68, 40)] == [16, 0, 0]


def test_an_int8_file_keeps_what_its_maker_kept():
    specs = floats(("blocks.0.attn.q", 256, 256))
    specs["blocks.1.attn.q"] = LayerSpec("int8", "int8_tensorwise", "I8", (256, 256), "w", "s", rotation_group=64)
    kept, adopted = policy.plan(specs, rotation=False)
    assert (kept.action, adopted.action, adopted.rotation_group) == ("keep", "adopt", 64)


def test_protect_keeps_and_force_takes():
    layers = floats(
        ("blocks.0.attn.q", 256, 256), ("blocks.0.ffn.2", 256, 256), ("txt_in", 256, 256), ("img_in", 256, 64)
    )
    actions = {d.layer: d.action for d in policy.plan(layers, protect="*.ffn.2, nothing", force="txt_in\nimg_in")}
    assert actions == {"blocks.0.attn.q": "quantise", "blocks.0.ffn.2": "keep", "txt_in": "quantise", "img_in": "keep"}


def test_a_pattern_without_a_match_is_told(caplog):
    with caplog.at_level(logging.WARNING, "native_int8.policy"):
        one("blocks.0.attn.q", 256, 256, protect="blokcs")
    assert "'blokcs'" in caplog.text
