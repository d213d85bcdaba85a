"""Pretrained weights: scores equal those of transformers, and errors of weights that do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning import VideoViT, compact, save_model
from sparseflow.pruning.model.pretrained import VIDEOMAE, VIT, build_from_pretrained, load_pretrained
from tests.pruning.models import clips, far

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56,
    "image_size": 24, "patch_size": 8, "num_labels": 5,
}  # fmt: skip
OURS: dict[str, Any] = {
    "img_size": 24, "num_frames": 1, "num_classes": 5, "embed_dim": 32, "depth": 2, "num_heads": 4,
    "mlp_ratio": 56 / 32, "patch_size": 8, "pool": "cls", "norm_eps": 1e-12,
}  # fmt: skip
OURS_MAE = OURS | {"num_frames": 6, "tubelet_size": 2, "pool": "mean", "position": "joint"}
TOLERANCE = 1e-5
"""Error of float32 scores divided by the largest score."""


def awake(model: Any) -> Any:
    """A transformers model in evaluation mode with large random weights."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=g)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif parameter.ndim in (2, 4, 5):
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(0.5 * noise)
    return model.eval()


def vit(kind: str = "ViTForImageClassification", **arguments: Any) -> Any:
    return awake(getattr(transformers, kind)(transformers.ViTConfig(**SHAPE | arguments)))


@cache
def vit_state() -> dict[str, Tensor]:
    """Weights of `vit()`; tests must not modify them."""
    return vit().state_dict()


def mae(kind: str = "VideoMAEForVideoClassification", **arguments: Any) -> Any:
    small = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    return awake(
        getattr(transformers, kind)(
            transformers.VideoMAEConfig(**SHAPE | {"num_frames": 6} | small | arguments)
        )
    )


def make_video_vit(sizes: dict[str, Any], **arguments: Any) -> VideoViT:
    return VideoViT(**sizes | arguments).eval()


@torch.no_grad()
def assert_alike(model: VideoViT, reference: Any, **kwargs: Any) -> None:
    x = clips(model)
    reference_output = reference(x if model.config.position == "joint" else x[:, 0], **kwargs).logits
    assert far(model(x), reference_output) <= TOLERANCE


def old_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A ViT's state dict with the names of transformers 4."""
    renamed = {}
    for name, value in state.items():
        new = re.sub(r"(^|\.)layers\.", r"\1encoder.layer.", name)
        new = re.sub(r"attention\.([qkv])_proj", lambda m: "attention.attention." + LONG[m[1]], new)
        new = new.replace("attention.o_proj", "attention.output.dense")
        renamed[new.replace("mlp.fc1", "intermediate.dense").replace("mlp.fc2", "output.dense")] = value
    return renamed


LONG = {"q": "query", "k": "key", "v": "value"}


@pytest.mark.parametrize("names", ["in memory", "old", "wrapped", "in a file"])
def test_load_pretrained_vit_matches_transformers(names: str, tmp_path: Path) -> None:
    reference = vit()
    state: Any = reference.state_dict()
    if names == "old":
        state = old_names(state)
        assert "vit.encoder.layer.1.attention.attention.key.bias" in state
    elif names == "wrapped":
        state = {f"module.{name}": value for name, value in state.items()}
    elif names == "in a file":
        reference.save_pretrained(tmp_path)
        state = tmp_path
    model = make_video_vit(OURS)
    loaded = load_pretrained(model, state)
    assert_alike(model, reference)
    assert loaded.architecture == VIT
    assert not loaded.unused and not loaded.not_loaded
    assert len(loaded.used) == len(reference.state_dict())
    assert not model.position_time.any()


@pytest.mark.parametrize("source", ["state dict", "folder", "sharded", "index", "file"])
def test_load_pretrained_videomae_matches_transformers(source: str, tmp_path: Path) -> None:
    reference, prefix = mae(), {"index": "model.safetensors.index.json", "file": "model.safetensors"}
    if source == "state dict":
        pixels = reference.state_dict()
    else:
        reference.save_pretrained(
            tmp_path, max_shard_size="20KB" if source in ("sharded", "index") else "1GB"
        )
        pixels = str(tmp_path / prefix.get(source, ""))
        assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (source in ("sharded", "index"))
    model = make_video_vit(OURS_MAE)
    loaded = load_pretrained(model, pixels)
    assert_alike(model, reference)
    assert loaded.architecture == VIDEOMAE
    assert not loaded.unused and not loaded.not_loaded
    assert not model.state_dict()["blocks.0.attention.qkv.bias"][32:64].any()


def test_fc_norm_keeps_its_epsilon() -> None:
    """transformers uses torch's default; the difference shows for small inputs of the norm."""
    reference = mae()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if re.search(r"projection|output\.dense", name):
                parameter.mul_(1e-3)
        # Only the sines remain; the bias of the patches subtracts their mean.
        table = reference.videomae.embeddings.position_embeddings
        reference.videomae.embeddings.patch_embeddings.projection.bias.copy_(-table.mean((0, 1)))
    model = make_video_vit(OURS_MAE)
    load_pretrained(model, reference.state_dict())
    # In float64, because the norm magnifies rounding errors of its small inputs.
    assert_alike(model.double(), reference.double())
    assert VideoViT(**model.to_dict()).norm.eps == model.norm.eps == 1e-5
    model.norm.eps = 1e-12
    with pytest.raises(AssertionError):
        assert_alike(model, reference)


def test_videomae_without_biases_matches_transformers() -> None:
    reference = mae(qv_bias=False)
    model = make_video_vit(OURS_MAE)
    load_pretrained(model, reference.state_dict())
    assert_alike(model, reference)


@pytest.mark.parametrize("named", [False, True], ids=["bare", "with a prefix"])
def test_load_pretrained_encoder_without_head(named: bool) -> None:
    """Without `fc_norm` and classifier the norm and head are not loaded."""
    reference, model = mae("VideoMAEForPreTraining" if named else "VideoMAEModel"), make_video_vit(OURS_MAE)
    loaded = load_pretrained(model, reference.state_dict())
    if not named:
        with torch.no_grad():
            model.head = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
            x = clips_of(OURS_MAE)
            expected = nn.LayerNorm(32, eps=1e-12)(reference(x).last_hidden_state.mean(1))
            assert far(model(x), expected) <= TOLERANCE
    else:
        assert "decoder.norm.weight" in loaded.unused and "mask_token" in loaded.unused
    last = {"norm.weight", "norm.bias"} if reference.config.use_mean_pooling else set()
    assert set(loaded.not_loaded) == {"head.weight", "head.bias"} | last
    assert model.norm.eps == 1e-12


def clips_of(sizes: Mapping[str, Any]) -> Tensor:
    return clips(VideoViT(**sizes))


def test_videomae_with_first_token_classifier_skips_head() -> None:
    """VideoViT pools all tokens, so the norm is loaded and the classifier is not."""
    model = make_video_vit(OURS_MAE)
    state = mae(use_mean_pooling=False).state_dict()
    loaded = load_pretrained(model, state)
    assert set(loaded.not_loaded) == {"head.weight", "head.bias"}
    assert "first token" in loaded.unused["classifier.weight"]
    torch.testing.assert_close(model.norm.weight, state["videomae.layernorm.weight"])


@pytest.mark.parametrize("reference", [vit, mae])
def test_head_with_other_classes_is_unused(reference: Callable[[], Any]) -> None:
    sizes = OURS if reference is vit else OURS_MAE
    model = make_video_vit(sizes, num_classes=3)
    before = model.head.weight.clone()
    loaded = load_pretrained(model, reference().state_dict())
    assert loaded.unused == dict.fromkeys(
        ("classifier.weight", "classifier.bias"), "it has 5 classes, the model 3"
    )
    assert loaded.not_loaded == ("head.weight", "head.bias")
    assert torch.equal(model.head.weight, before)


def test_head_false_skips_classifier() -> None:
    loaded = load_pretrained(make_video_vit(OURS), vit_state(), head=False)
    assert loaded.unused["classifier.bias"] == "head=False"
    assert loaded.not_loaded == ("head.weight", "head.bias")


def test_pooler_of_vit_is_unused() -> None:
    loaded = load_pretrained(make_video_vit(OURS), vit("ViTModel").state_dict())
    assert set(loaded.unused) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert loaded.not_loaded == ("head.weight", "head.bias")


def test_vit_into_mean_pooling_skips_class_token() -> None:
    reference, model = vit(), make_video_vit(OURS, pool="mean")
    loaded = load_pretrained(model, reference.state_dict())
    assert set(loaded.unused) == {"vit.embeddings.cls_token", "classifier.weight", "classifier.bias"}
    assert loaded.not_loaded == ("head.weight", "head.bias")


def test_positions_of_larger_images_are_interpolated() -> None:
    """Equal to the interpolation of transformers."""
    reference, model = vit(), make_video_vit(OURS, img_size=40)
    load_pretrained(model, reference.state_dict())
    assert_alike(model, reference, interpolate_pos_encoding=True)


@pytest.mark.parametrize("position", ["factored", "joint"])
@pytest.mark.parametrize("tubelet", [1, 2, 4])
def test_static_clip_embeds_as_its_image(position: str, tubelet: int) -> None:
    """A kernel spread over equal frames has the output of the 2-D kernel."""
    reference = vit()
    model = make_video_vit(OURS, num_frames=4, tubelet_size=tubelet, position=position)
    load_pretrained(model, reference.state_dict())
    image = clips(make_video_vit(OURS))
    with torch.no_grad():
        tokens = model.embed(image.expand(-1, 4, -1, -1, -1)).x
        expected = reference.vit.embeddings(image[:, 0])
    assert far(tokens[:, 0], expected[:, 0]) <= TOLERANCE
    for frame in tokens[:, 1:].unflatten(1, (4 // tubelet, 9)).unbind(1):
        assert far(frame, expected[:, 1:]) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_load_pretrained_keeps_model_dtype(dtype: torch.dtype) -> None:
    state = {name: value.to(dtype) for name, value in vit_state().items()}
    model = make_video_vit(OURS)
    load_pretrained(model, state)
    wide = make_video_vit(OURS)
    load_pretrained(wide, {name: value.float() for name, value in state.items()})
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, wide.state_dict()[name]), name
    load_pretrained(model.to(dtype), state)
    assert model.head.weight.dtype == dtype


def test_load_pretrained_keeps_gates_and_score() -> None:
    ast = {"stages": {1: 0.5}, "keep": {"head": 0.5}}
    model = make_video_vit(OURS_MAE, use_ast_prune=True, ast_cfg=ast)
    loaded = load_pretrained(model, mae().state_dict())
    assert loaded.not_loaded and all(name.startswith("pruner.") for name in loaded.not_loaded)
    assert model(clips(model)).shape == (2, 5)


def test_weights_can_be_trained_and_the_source_is_not_shared() -> None:
    state = vit().state_dict()
    retained = {name: value.clone() for name, value in state.items()}
    model = make_video_vit(OURS)
    load_pretrained(model, state)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(state[name], value) for name, value in retained.items())


@pytest.mark.parametrize("reference", [vit, mae])
def test_build_from_pretrained_directory(reference: Callable[..., Any], tmp_path: Path) -> None:
    """The epsilon and an MLP width that a rounded `mlp_ratio` would change come from the directory."""
    reference_model = reference(layer_norm_eps=1e-6, hidden_size=28, intermediate_size=61)
    assert int(28 * (61 / 28)) == 60
    reference_model.save_pretrained(tmp_path)
    frames = 1 if reference is vit else 6
    model = build_from_pretrained(tmp_path, num_frames=frames, num_classes=5)
    assert not model.training
    assert model.config.norm_eps == 1e-6 and model.config.num_heads == 4
    assert model.config.tubelet_size == (1 if reference is vit else 2)
    assert_alike(model, reference_model)


def test_build_from_pretrained_state_dict() -> None:
    reference = vit()
    model = build_from_pretrained(
        reference.state_dict(), num_frames=4, num_classes=3, tubelet_size=2, use_ast_prune=True,
        ast_cfg={"stages": {1: 0.5}}, num_heads=4, drop_path_rate=0.1,
    )  # fmt: skip
    assert model.config.grid == (2, 3, 3)
    assert model.config.drop_path_rate == 0.1 and model.ast is not None
    assert model(clips(model)).shape == (2, 3)
    config = reference.config.to_dict() | {"image_size": [24, 24]}
    assert_alike(
        build_from_pretrained(reference.state_dict(), num_frames=1, num_classes=5, config=config), reference
    )
    larger = build_from_pretrained(
        reference.state_dict(), num_frames=1, num_classes=5, config=config, img_size=32
    )
    assert_alike(larger, reference, interpolate_pos_encoding=True)


def test_build_from_pretrained_without_config_needs_arguments() -> None:
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (vit, "num_heads", {}),
        (mae, "img_size", {"num_heads": 4}),
    ]
    for reference, name, arguments in cases:
        with pytest.raises(InputError, match=f"`{name}`"):
            build_from_pretrained(reference().state_dict(), num_frames=6, num_classes=5, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_eps": 1e-6}, r"norm_eps=1e-12.* norm_eps=1e-06 \(.*layer_norm_eps"),
        ({"embed_dim": 64, "mlp_ratio": 56 / 64}, "embed_dim=32.*embed_dim=64"),
        ({"depth": 3}, "depth=2.*depth=3"),
        ({"mlp_ratio": 4}, "mlp_channels=56.*mlp_channels=128.*`mlp_ratio`"),
        ({"patch_size": 4}, "patch_size=8.*patch_size=4"),
        (
            {"in_chans": 1, "depth": 1},
            "depth=2, in_chans=3.*depth=1, in_chans=1",
        ),
        ({"num_heads": 8}, "num_heads=4.*num_heads=8"),
    ],
)
def test_mismatched_sizes_raise(changes: dict[str, Any], message: str) -> None:
    config = {} if "norm_eps" in changes else {"num_attention_heads": 4}
    with pytest.raises(InputError, match=message):
        load_pretrained(make_video_vit(OURS, **changes), vit_state(), config=config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "factored"}, "position='factored'.*position='joint'"),
        ({"pool": "cls"}, "pool='cls'.*pool='mean'"),
        ({"tubelet_size": 3}, "tubelet_size=2.*tubelet_size=3"),
    ],
)
def test_videomae_into_unsuitable_model_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_pretrained(make_video_vit(OURS_MAE, **changes), mae().state_dict())


def test_positions_of_another_rank_raise() -> None:
    state = changed(vit__embeddings__position_embeddings=torch.zeros(10))
    with pytest.raises(InputError, match=r"`img_size` .* at least 1"):
        build_from_pretrained(state, num_frames=1, num_classes=5, num_heads=4)


def test_compact_model_refuses_weights() -> None:
    with pytest.raises(InputError, match="`compact`"):
        load_pretrained(compact(make_video_vit(OURS)), vit_state())


@pytest.mark.parametrize("size", [[[24], [24]], ["24", "24"], {}, "24", [24.0], -24, 10**30])
def test_invalid_image_size_raises(size: Any) -> None:
    config = {"num_attention_heads": 2, "image_size": size}
    with pytest.raises(InputError, match="`img_size`"):
        build_from_pretrained(vit_state(), num_frames=1, num_classes=5, config=config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu_new"}, "'gelu_new'"),
        ({"layer_norm_eps": "small"}, r"`layer_norm_eps` \(='small'\) in the configuration"),
        ({"num_attention_heads": 0}, r"`num_attention_heads` \(=0\)"),
    ],
)
def test_mismatched_configuration_raises(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_pretrained(make_video_vit(OURS), vit_state(), config=config)


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    """A ViT's state dict with replaced, added or removed weights; `__` stands for a dot."""
    renamed = dict(vit_state())
    for name, value in changes.items():
        renamed.pop(name.replace("__", "."), None)
        if value is not None:
            renamed[name.replace("__", ".")] = value
    return renamed


KERNEL = "vit__embeddings__patch_embeddings__projection__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({KERNEL: None}, "expected one `embeddings.patch"),
        ({f"other__{KERNEL}": torch.zeros(32, 3, 8, 8)}, "neither a ViT nor a VideoMAE"),
        ({KERNEL: torch.zeros(32, 3, 2, 8, 8)}, "neither a ViT nor a VideoMAE"),
        ({"vit__embeddings__cls_token": None}, "neither a ViT nor a VideoMAE"),
        ({"vit__embeddings__position_embeddings": None}, "neither a ViT nor a VideoMAE"),
        ({"vit__embeddings__distillation_token": torch.zeros(1, 1, 32)}, "distillation"),
        ({"vit__layers__0__lambda_1": torch.zeros(32)}, "`vit.layers.0.lambda_1`"),
        ({"vit__layers__1__mlp__fc2__bias": None}, "layer 1 .*`output.dense.bias`"),
        ({"vit__layers__7__mlp__fc2__bias": torch.zeros(32)}, "layer 2 .*`attention.attention.query"),
        ({"vit__layernorm__bias": None}, "lacks `vit.layernorm.bias`"),
        ({KERNEL: torch.zeros(32, 3, 8, 4)}, "8 x 4 patches"),
        (
            {"vit__layers__0__attention__q_proj__weight": torch.zeros(16, 32)},
            r"\[16, 32\].*expected.*\[32, 32\]",
        ),
        (
            {"vit__layernorm__bias": torch.zeros(32, dtype=torch.int8)},
            r"int8 \[32\].*expected floating-point",
        ),
        ({"vit__layernorm__bias": torch.zeros(32, device="meta")}, "on meta; expected"),
        ({"vit__embeddings__position_embeddings": torch.zeros(1, 7, 32)}, r"\[1, 7, 32\]"),
        ({"vit__embeddings__position_embeddings": torch.zeros(10)}, r"\[10\]"),
        ({"classifier__bias": torch.zeros(5, 2)}, "10 classes"),
    ],
)
def test_unknown_weights_raise(changes: dict[str, Tensor | None], message: str) -> None:
    model = make_video_vit(OURS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if message == "10 classes":
        assert message in load_pretrained(model, changed(**changes)).unused["classifier.bias"]
        return
    with pytest.raises(InputError, match=message):
        load_pretrained(model, changed(**changes))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("source", [nn.Linear(1, 1), {"a": 1}, {1: torch.zeros(1)}, {}, None])
def test_invalid_sources_raise(source: Any) -> None:
    with pytest.raises(InputError, match="state dict"):
        load_pretrained(make_video_vit(OURS), source)


def test_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"google/vit.*hf download google/vit"):
        load_pretrained(make_video_vit(OURS), "google/vit")
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_pretrained(make_video_vit(OURS), tmp_path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".PTH"])
def test_pickles_are_refused(suffix: str, tmp_path: Path) -> None:
    """The content would raise if it were unpickled."""
    file = tmp_path / f"pytorch_model{suffix}"
    file.write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(InputError, match=file.name):
        load_pretrained(make_video_vit(OURS), file)


def test_directory_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle"):
        load_pretrained(make_video_vit(OURS), tmp_path)


def test_damaged_safetensors_raise(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content in (b"", b"\x80\x02}q\x00.", b"{}" * 50):
        file.write_bytes(content)
        with pytest.raises(FileFormatError, match="safetensors"):
            load_pretrained(make_video_vit(OURS), file)


def test_saved_video_vit_error_names_load_model(tmp_path: Path) -> None:
    save_model(make_video_vit(OURS), tmp_path / "ours.safetensors")
    with pytest.raises(InputError, match="`load_model`"):
        load_pretrained(make_video_vit(OURS), tmp_path / "ours.safetensors")


@pytest.mark.parametrize(
    ("index", "kind", "message"),
    [
        ("{", FileFormatError, "index.json"),
        ("[]", FileFormatError, "index.json"),
        ("{}", FileFormatError, "no `weight_map`"),
        ({"weight_map": {"a": 1}}, FileFormatError, "no `weight_map`"),
        ({"weight_map": {"a": "../up.safetensors"}}, FileFormatError, "'../up.safetensors'"),
        ({"weight_map": {"a": "part.bin"}}, FileFormatError, "'part.bin'"),
        ({"weight_map": {"a": "gone.safetensors"}}, InputError, "gone.safetensors"),
        ({"weight_map": {"b": "part.safetensors"}}, FileFormatError, "part.safetensors lacks `b`"),
    ],
)
def test_damaged_index_raises(index: Any, kind: type[Exception], message: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "part.safetensors")
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(kind, match=message):
        load_pretrained(make_video_vit(OURS), tmp_path)


def test_config_json_is_checked(tmp_path: Path) -> None:
    """A configuration without `model_type` is ignored; a damaged one raises."""
    vit().save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    load_pretrained(make_video_vit(OURS), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit", "num_attention_heads": 2}')
    with pytest.raises(InputError, match=r"num_heads=2.*num_heads=4"):
        load_pretrained(make_video_vit(OURS), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileFormatError, match="json"):
        load_pretrained(make_video_vit(OURS), tmp_path)
