"""Trained weights: scores equal those of transformers' own models, and what does not fit says why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning import VideoViT, compact, save
from sparseflow.pruning.model.pretrained import VIDEOMAE, VIT, load_pretrained, video_vit_for
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
"""Of scores in float32, over the largest."""


def awake(model: Any) -> Any:
    """A model of transformers in evaluation mode, everything in it drawn so large that it matters."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, each in model.named_parameters():
            drawn = torch.randn(each.shape, generator=g)
            if "norm" in name and name.endswith("weight"):
                each.copy_(1.0 + 0.3 * drawn)
            elif each.ndim in (2, 4, 5):
                each.copy_(drawn * each[0].numel() ** -0.5)
            else:
                each.copy_(0.5 * drawn)
    return model.eval()


def vit(kind: str = "ViTForImageClassification", **others: Any) -> Any:
    return awake(getattr(transformers, kind)(transformers.ViTConfig(**SHAPE | others)))


def mae(kind: str = "VideoMAEForVideoClassification", **others: Any) -> Any:
    small = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    return awake(
        getattr(transformers, kind)(transformers.VideoMAEConfig(**SHAPE | {"num_frames": 6} | small | others))
    )


def ours(sizes: dict[str, Any], **others: Any) -> VideoViT:
    return VideoViT(**sizes | others).eval()


@torch.no_grad()
def assert_alike(model: VideoViT, reference: Any, **kwargs: Any) -> None:
    x = clips(model)
    theirs = reference(x if model.config.position == "joint" else x[:, 0], **kwargs).logits
    assert far(model(x), theirs) <= TOLERANCE


def old_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A ViT's state dict as transformers 4 named it."""
    found = {}
    for name, value in state.items():
        new = re.sub(r"(^|\.)layers\.", r"\1encoder.layer.", name)
        new = re.sub(r"attention\.([qkv])_proj", lambda m: "attention.attention." + LONG[m[1]], new)
        new = new.replace("attention.o_proj", "attention.output.dense")
        found[new.replace("mlp.fc1", "intermediate.dense").replace("mlp.fc2", "output.dense")] = value
    return found


LONG = {"q": "query", "k": "key", "v": "value"}


@pytest.mark.parametrize("names", ["in memory", "old", "wrapped", "in a file"])
def test_a_vit_scores_as_it_did(names: str, tmp_path: Path) -> None:
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
    model = ours(OURS)
    loaded = load_pretrained(model, state)
    assert_alike(model, reference)
    assert loaded.architecture == VIT
    assert not loaded.left and not loaded.untouched
    assert len(loaded.taken) == len(reference.state_dict())
    assert not model.position_time.any()


@pytest.mark.parametrize("source", ["state dict", "folder", "sharded", "index", "file"])
def test_a_videomae_scores_as_it_did(source: str, tmp_path: Path) -> None:
    reference, where = mae(), {"index": "model.safetensors.index.json", "file": "model.safetensors"}
    if source == "state dict":
        given = reference.state_dict()
    else:
        reference.save_pretrained(
            tmp_path, max_shard_size="20KB" if source in ("sharded", "index") else "1GB"
        )
        given = str(tmp_path / where.get(source, ""))
        assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (source in ("sharded", "index"))
    model = ours(OURS_MAE)
    loaded = load_pretrained(model, given)
    assert_alike(model, reference)
    assert loaded.architecture == VIDEOMAE
    assert not loaded.left and not loaded.untouched
    assert not model.state_dict()["blocks.0.attention.qkv.bias"][32:64].any()


def test_the_epsilon_of_fc_norm_is_its_own() -> None:
    """transformers makes it with torch's own, which shows where what it normalises is small."""
    reference = mae()
    with torch.no_grad():
        for name, each in reference.named_parameters():
            if re.search(r"projection|output\.dense", name):
                each.mul_(1e-3)
        # What is left are the sines, whose mean is subtracted by the patches' bias.
        table = reference.videomae.embeddings.position_embeddings
        reference.videomae.embeddings.patch_embeddings.projection.bias.copy_(-table.mean((0, 1)))
    model = ours(OURS_MAE)
    load_pretrained(model, reference.state_dict())
    assert_alike(model, reference)
    assert VideoViT(**model.to_dict()).norm.eps == model.norm.eps == 1e-5
    model.norm.eps = 1e-12
    with pytest.raises(AssertionError):
        assert_alike(model, reference)


def test_a_videomae_without_biases() -> None:
    reference = mae(qv_bias=False)
    model = ours(OURS_MAE)
    load_pretrained(model, reference.state_dict())
    assert_alike(model, reference)


@pytest.mark.parametrize("named", [False, True], ids=["bare", "with a prefix"])
def test_an_encoder_alone(named: bool) -> None:
    """Without `fc_norm` and classifier these stay as they were made."""
    reference, model = mae("VideoMAEForPreTraining" if named else "VideoMAEModel"), ours(OURS_MAE)
    loaded = load_pretrained(model, reference.state_dict())
    if not named:
        with torch.no_grad():
            model.head = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
            x = clips_of(OURS_MAE)
            wanted = nn.LayerNorm(32, eps=1e-12)(reference(x).last_hidden_state.mean(1))
            assert far(model(x), wanted) <= TOLERANCE
    else:
        assert "decoder.norm.weight" in loaded.left and "mask_token" in loaded.left
    last = {"norm.weight", "norm.bias"} if reference.config.use_mean_pooling else set()
    assert set(loaded.untouched) == {"head.weight", "head.bias"} | last
    assert model.norm.eps == 1e-12


def clips_of(sizes: Mapping[str, Any]) -> Tensor:
    return clips(VideoViT(**sizes))


def test_a_videomae_that_reads_its_first_token() -> None:
    """A VideoViT reads the mean of all, so the norm is taken, and the classifier is not."""
    model = ours(OURS_MAE)
    state = mae(use_mean_pooling=False).state_dict()
    loaded = load_pretrained(model, state)
    assert set(loaded.untouched) == {"head.weight", "head.bias"}
    assert "first token" in loaded.left["classifier.weight"]
    torch.testing.assert_close(model.norm.weight, state["videomae.layernorm.weight"])


@pytest.mark.parametrize("reference", [vit, mae])
def test_a_head_with_other_classes(reference: Callable[[], Any]) -> None:
    sizes = OURS if reference is vit else OURS_MAE
    model = ours(sizes, num_classes=3)
    before = model.head.weight.clone()
    loaded = load_pretrained(model, reference().state_dict())
    assert loaded.left == dict.fromkeys(
        ("classifier.weight", "classifier.bias"), "it has 5 classes, and the model 3"
    )
    assert loaded.untouched == ("head.weight", "head.bias")
    assert torch.equal(model.head.weight, before)


def test_no_head() -> None:
    loaded = load_pretrained(ours(OURS), vit().state_dict(), head=False)
    assert loaded.left["classifier.bias"] == "head=False"
    assert loaded.untouched == ("head.weight", "head.bias")


def test_a_vit_without_a_pooler_or_with_one() -> None:
    loaded = load_pretrained(ours(OURS), vit("ViTModel").state_dict())
    assert set(loaded.left) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert loaded.untouched == ("head.weight", "head.bias")


def test_a_vit_into_a_mean() -> None:
    reference, model = vit(), ours(OURS, pool="mean")
    loaded = load_pretrained(model, reference.state_dict())
    assert set(loaded.left) == {"vit.embeddings.cls_token", "classifier.weight", "classifier.bias"}
    assert loaded.untouched == ("head.weight", "head.bias")


def test_positions_are_interpolated() -> None:
    """As transformers does when it is asked to."""
    reference, model = vit(), ours(OURS, img_size=40)
    load_pretrained(model, reference.state_dict())
    assert_alike(model, reference, interpolate_pos_encoding=True)


@pytest.mark.parametrize("position", ["factored", "joint"])
@pytest.mark.parametrize("tubelet", [1, 2, 4])
def test_a_still_clip_embeds_as_its_image(position: str, tubelet: int) -> None:
    """A kernel spread over frames sees one image in all of them as the kernel saw the image."""
    reference = vit()
    model = ours(OURS, num_frames=4, tubelet_size=tubelet, position=position)
    load_pretrained(model, reference.state_dict())
    image = clips(ours(OURS))
    with torch.no_grad():
        found = model.embed(image.expand(-1, 4, -1, -1, -1)).x
        wanted = reference.vit.embeddings(image[:, 0])
    assert far(found[:, 0], wanted[:, 0]) <= TOLERANCE
    for frame in found[:, 1:].unflatten(1, (4 // tubelet, 9)).unbind(1):
        assert far(frame, wanted[:, 1:]) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_the_models(dtype: torch.dtype) -> None:
    state = {name: value.to(dtype) for name, value in vit().state_dict().items()}
    model = ours(OURS)
    load_pretrained(model, state)
    wide = ours(OURS)
    load_pretrained(wide, {name: value.float() for name, value in state.items()})
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, wide.state_dict()[name]), name
    load_pretrained(model.to(dtype), state)
    assert model.head.weight.dtype == dtype


def test_what_prunes_is_left_as_it_is() -> None:
    ast = {"stages": {1: 0.5}, "keep": {"head": 0.5}}
    model = ours(OURS_MAE, use_ast_prune=True, ast_cfg=ast)
    loaded = load_pretrained(model, mae().state_dict())
    assert loaded.untouched and all(name.startswith(("gates", "score")) for name in loaded.untouched)
    assert model(clips(model)).shape == (2, 5)


def test_weights_can_be_trained_and_the_source_is_not_shared() -> None:
    state = vit().state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    model = ours(OURS)
    load_pretrained(model, state)
    assert all(each.requires_grad for each in model.parameters())
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1.0)
    assert all(torch.equal(state[name], value) for name, value in kept.items())


@pytest.mark.parametrize("reference", [vit, mae])
def test_a_model_for_a_folder(reference: Callable[..., Any], tmp_path: Path) -> None:
    """Of an epsilon and a width that rounding of `mlp_ratio` would make too narrow, as the folder says."""
    made = reference(layer_norm_eps=1e-6, hidden_size=28, intermediate_size=61)
    assert int(28 * (61 / 28)) == 60
    made.save_pretrained(tmp_path)
    frames = 1 if reference is vit else 6
    model = video_vit_for(tmp_path, num_frames=frames, num_classes=5)
    assert not model.training
    assert model.config.norm_eps == 1e-6 and model.config.num_heads == 4
    assert model.config.tubelet_size == (1 if reference is vit else 2)
    assert_alike(model, made)


def test_a_model_for_a_state_dict() -> None:
    reference = vit()
    model = video_vit_for(
        reference.state_dict(), num_frames=4, num_classes=3, tubelet_size=2, use_ast_prune=True,
        ast_cfg={"stages": {1: 0.5}}, num_heads=4, drop_path_rate=0.1,
    )  # fmt: skip
    assert model.config.grid == (2, 3, 3)
    assert model.config.drop_path_rate == 0.1 and model.ast is not None
    assert model(clips(model)).shape == (2, 3)
    told = reference.config.to_dict() | {"image_size": [24, 24]}
    assert_alike(video_vit_for(reference.state_dict(), num_frames=1, num_classes=5, config=told), reference)
    larger = video_vit_for(reference.state_dict(), num_frames=1, num_classes=5, config=told, img_size=32)
    assert_alike(larger, reference, interpolate_pos_encoding=True)


def test_what_a_state_dict_does_not_tell() -> None:
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (vit, "num_heads", {}),
        (mae, "img_size", {"num_heads": 4}),
    ]
    for reference, name, others in cases:
        with pytest.raises(InputError, match=f"`{name}` does not show .* give `{name}`, or `config`"):
            video_vit_for(reference().state_dict(), num_frames=6, num_classes=5, **others)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_eps": 1e-6}, r"it has norm_eps=1e-12, and the model has norm_eps=1e-06 \(.*layer_norm_eps"),
        ({"embed_dim": 64, "mlp_ratio": 56 / 64}, "it has embed_dim=32, and the model has embed_dim=64"),
        ({"depth": 3}, "it has depth=2, and the model has depth=3"),
        ({"mlp_ratio": 4}, "channels=56, and the model has channels=128 .*`mlp_ratio`"),
        ({"patch_size": 4}, "patch_size=8, and the model has patch_size=4"),
        (
            {"in_chans": 1, "depth": 1},
            "depth=2, in_chans=3, and the model has depth=1, in_chans=1.*Construct",
        ),
        ({"num_heads": 8}, "num_heads=4, and the model has num_heads=8"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    config = {} if "norm_eps" in changes else {"num_attention_heads": 4}
    with pytest.raises(InputError, match=message):
        load_pretrained(ours(OURS, **changes), vit().state_dict(), config=config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "factored"}, "position='factored': construct it with position='joint'"),
        ({"pool": "cls"}, "pool='cls': construct it with pool='mean', since it has no class token"),
        ({"tubelet_size": 3}, "it has tubelet_size=2, and the model has tubelet_size=3"),
    ],
)
def test_what_a_videomae_needs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_pretrained(ours(OURS_MAE, **changes), mae().state_dict())


def test_positions_of_another_rank() -> None:
    state = changed(vit__embeddings__position_embeddings=torch.zeros(10))
    with pytest.raises(InputError, match=r"`img_size` .* at least 1"):
        video_vit_for(state, num_frames=1, num_classes=5, num_heads=4)


def test_a_model_that_cannot_take_weights() -> None:
    with pytest.raises(InputError, match="before `compact`"):
        load_pretrained(compact(ours(OURS)), vit().state_dict())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu_new"}, "'gelu_new'; VideoViT has exact GELU"),
        ({"layer_norm_eps": "small"}, r"`layer_norm_eps` \(='small'\) in the configuration"),
        ({"num_attention_heads": 0}, r"`num_attention_heads` \(=0\)"),
    ],
)
def test_a_configuration_that_does_not_fit(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_pretrained(ours(OURS), vit().state_dict(), config=config)


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    """A ViT's state dict with weights replaced, added or taken away; `__` stands for a dot."""
    found = dict(vit().state_dict())
    for name, value in changes.items():
        found.pop(name.replace("__", "."), None)
        if value is not None:
            found[name.replace("__", ".")] = value
    return found


KERNEL = "vit__embeddings__patch_embeddings__projection__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({KERNEL: None}, "holds neither a ViT nor a VideoMAE.*expected one `embeddings.patch"),
        ({f"other__{KERNEL}": torch.zeros(32, 3, 8, 8)}, "holds neither"),
        ({KERNEL: torch.zeros(32, 3, 2, 8, 8)}, "holds neither"),
        ({"vit__embeddings__cls_token": None}, "holds neither"),
        ({"vit__embeddings__position_embeddings": None}, "holds neither"),
        ({"vit__embeddings__distillation_token": torch.zeros(1, 1, 32)}, "no place for .*distillation"),
        ({"vit__layers__0__lambda_1": torch.zeros(32)}, "no place for `vit.layers.0.lambda_1`"),
        ({"vit__layers__1__mlp__fc2__bias": None}, "layer 1 lacks `output.dense.bias`"),
        ({"vit__layers__7__mlp__fc2__bias": torch.zeros(32)}, "layer 2 lacks `attention.attention.query"),
        ({"vit__layernorm__bias": None}, "lacks `vit.layernorm.bias`: its weights are not complete"),
        ({KERNEL: torch.zeros(32, 3, 8, 4)}, "patches of 8 x 4 pixels"),
        (
            {"vit__layers__0__attention__q_proj__weight": torch.zeros(16, 32)},
            r"\[16, 32\].*expected.*\[32, 32\]",
        ),
        (
            {"vit__layernorm__bias": torch.zeros(32, dtype=torch.int8)},
            r"int8 \[32\].*expected floating-point",
        ),
        ({"vit__layernorm__bias": torch.zeros(32, device="meta")}, "on meta; expected"),
        ({"vit__embeddings__position_embeddings": torch.zeros(1, 7, 32)}, r"\[1, 7, 32\].*as many rows"),
        ({"vit__embeddings__position_embeddings": torch.zeros(10)}, r"\[10\]; expected \[1, 1 \+ rows"),
        ({"classifier__bias": torch.zeros(5, 2)}, "10 classes"),
    ],
)
def test_weights_that_are_not_understood(changes: dict[str, Tensor | None], message: str) -> None:
    model = ours(OURS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if message == "10 classes":
        assert message in load_pretrained(model, changed(**changes)).left["classifier.bias"]
        return
    with pytest.raises(InputError, match=message):
        load_pretrained(model, changed(**changes))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("source", [nn.Linear(1, 1), {"a": 1}, {1: torch.zeros(1)}, {}, None])
def test_sources_that_are_none(source: Any) -> None:
    with pytest.raises(InputError, match="state dict"):
        load_pretrained(ours(OURS), source)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file or folder google/vit.*hf download google/vit"):
        load_pretrained(ours(OURS), "google/vit")
    with pytest.raises(InputError, match=r"holds neither model\.safetensors nor"):
        load_pretrained(ours(OURS), tmp_path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".PTH"])
def test_pickles_are_refused(suffix: str, tmp_path: Path) -> None:
    """Unread: what is in them would raise."""
    file = tmp_path / f"pytorch_model{suffix}"
    file.write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(InputError, match=r"is a pickle.*Convert it"):
        load_pretrained(ours(OURS), file)


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle"):
        load_pretrained(ours(OURS), tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content in (b"", b"\x80\x02}q\x00.", b"{}" * 50):
        file.write_bytes(content)
        with pytest.raises(FileFormatError, match="no safetensors file that can be read"):
            load_pretrained(ours(OURS), file)


def test_a_model_of_ours_is_pointed_to_load(tmp_path: Path) -> None:
    save(ours(OURS), tmp_path / "ours.safetensors")
    with pytest.raises(InputError, match=r"sparseflow\.pruning\.save"):
        load_pretrained(ours(OURS), tmp_path / "ours.safetensors")


@pytest.mark.parametrize(
    ("index", "kind", "message"),
    [
        ("{", FileFormatError, "cannot be read as JSON"),
        ("[]", FileFormatError, "holds no JSON object"),
        ("{}", FileFormatError, "no `weight_map`"),
        ({"weight_map": {"a": 1}}, FileFormatError, "no `weight_map`"),
        ({"weight_map": {"a": "../up.safetensors"}}, FileFormatError, "names '../up.safetensors'"),
        ({"weight_map": {"a": "part.bin"}}, FileFormatError, "names 'part.bin'"),
        ({"weight_map": {"a": "gone.safetensors"}}, InputError, "gone.safetensors, which is not beside it"),
        ({"weight_map": {"b": "part.safetensors"}}, FileFormatError, "part.safetensors lacks `b`"),
    ],
)
def test_a_damaged_index(index: Any, kind: type[Exception], message: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "part.safetensors")
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(kind, match=message):
        load_pretrained(ours(OURS), tmp_path)


def test_a_file_beside_another_configuration(tmp_path: Path) -> None:
    """One that is not of a model is not heeded; one that is damaged is told."""
    vit().save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    load_pretrained(ours(OURS), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit", "num_attention_heads": 2}')
    with pytest.raises(InputError, match="num_heads=2, and the model has num_heads=4"):
        load_pretrained(ours(OURS), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileFormatError, match="cannot be read as JSON"):
        load_pretrained(ours(OURS), tmp_path)
