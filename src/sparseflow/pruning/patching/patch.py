"""Token pruning of pretrained transformers in one line.

::

    from sparseflow.pruning import patch, unpatch

    patch(model, keep=0.5, selector="uniform")   # half of the tokens from a quarter of the depth on
    logits = model(pixel_values=images).logits
    unpatch(model)

The weights and the names of the state dict do not change, so that a patched model can be fine-tuned, saved
and compiled. Dropping is hard in training, too: gradients reach what the kept tokens pass through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from sparseflow.core.checks import check_positive
from sparseflow.errors import InputError
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.patching.families import Grid, PatchAdapter, PatchTarget, find_encoder
from sparseflow.pruning.patching.hooks import install_pruner, remove_pruners
from sparseflow.pruning.patching.profile import Inputs, choose_share, make_call, make_inputs
from sparseflow.pruning.patching.pruner import TokenPruner
from sparseflow.pruning.selectors.ast import ScoreConfig


@dataclass(frozen=True, kw_only=True)
class PatchResult:
    """What `patch` changed.

    Attributes:
        family: Family of the model.
        selector: Selector of tokens.
        stages: Block -> share of the grid tokens that its input has.
        grid: Tokens in time, rows and columns for an input of the usual size.
        tokens: Grid tokens of each block, for this grid.
        latency_ms: Measured latency with these stages; None without a budget.
    """

    family: str
    selector: str
    stages: Mapping[int, float]
    grid: Grid
    tokens: tuple[int, ...]
    latency_ms: float | None = None

    def list_changes(self) -> list[tuple[int, int]]:
        """Block and grid tokens where the number of tokens changes, beginning with block 0."""
        return [
            (block, count)
            for block, count in enumerate(self.tokens)
            if block == 0 or count != self.tokens[block - 1]
        ]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "family": self.family,
            "selector": self.selector,
            "stages": {str(block): share for block, share in self.stages.items()},
            "grid": list(self.grid),
            "tokens": list(self.tokens),
            "budget_latency_ms": self.latency_ms,
        }


def patch(
    model: nn.Module,
    *,
    keep: float = 0.5,
    stages: Mapping[int, float] | None = None,
    selector: str = "ast",
    score: ScoreConfig | None = None,
    budget_ms: float | None = None,
    inputs: Inputs | None = None,
    adapter: PatchAdapter | None = None,
) -> PatchResult:
    """Drop tokens of a transformer of transformers or timm, in place.

    Each stage keeps a fixed number of tokens of each sample; class tokens and registers are always kept.
    Later blocks compute only the kept tokens. Means over tokens and attention pooling use the kept tokens,
    and `last_hidden_state` and `hidden_states` have the kept tokens, in the order of the grid;
    `get_kept_positions` says which ones they are. With `keep=1` nothing changes. A patched model can be
    patched again with other settings. Patch a model before `torch.compile`.

    Args:
        model: Encoder, or a model with one: ViT, DeiT, DINOv2 with and without registers, DINOv3, CLIP,
            SigLIP, BEiT, VideoMAE, ViViT, TimeSformer or V-JEPA 2 of transformers, or a ViT, DeiT or EVA of
            timm. TimeSformer keeps the same patches in all frames, in multiples of a row of the grid.
        keep: Share of the grid tokens that is kept from the block at a quarter of the depth on, above 0 and
            at most 1. Not used with `stages`.
        stages: Block -> share of all grid tokens that its input has; shares must not rise with the block.
        selector: `"ast"`, the AST score of the features before the stage; `"random"`, in evaluation the same
            tokens of every sample; `"uniform"`, evenly spaced tokens; `"frame_difference"` or `"evs"`, the
            change of a patch since the previous frame; `"attention"`, the attention that tokens receive from
            the class token, or from all tokens if there is none; `"vid_tldr"`, the sharpness of the attention
            of tokens; or `"tome"`, which merges similar tokens, and biases attention by their number if the
            blocks accept a mask. The last three read the attention of the stage's block and do not support
            TimeSformer; only `"tome"` supports rotary embeddings and relative position biases of a block.
        score: Parameters of the AST score. Without them, images have cells of 2 x 2 patches as the finest
            level, because only the space map tells their patches apart.
        budget_ms: Latency budget, milliseconds per call on the device of the model, without torch.compile.
            The largest share that meets it replaces `keep`; it is measured at several shares. The shares of
            several stages are raised to a common power, so that the last one is this share.
        inputs: Example for the budget: the first argument of the model, or all arguments by name. By default
            one random sample for the encoder.
        adapter: Description of a model of another family, such as a `ModelFamily`; `model` is then the
            encoder.

    Raises:
        InputError: The model has no supported transformer, is compiled, or is used in a way that needs the
            features of all patches; an argument is out of range; or no share meets the budget. The model is
            then not patched.
    """
    _check_not_compiled(model)
    target = find_encoder(model, adapter)
    depth = len(target.adapter.list_blocks(target.encoder))
    config = ASTConfig(
        stages={depth // 4: keep} if stages is None else dict(stages),
        selector=selector,
        score=_choose_score(target) if score is None else score,
    )
    config.check_depth(depth)
    if budget_ms is None:
        return _install(model, target, config)
    return _install_for_budget(model, target, config, budget_ms, inputs)


def _choose_score(target: PatchTarget) -> ScoreConfig:
    """Default parameters of the AST score for the usual input."""
    frames, rows, columns = _compute_usual_grid(target.encoder, target.adapter)
    if frames > 1:
        return ScoreConfig()
    finest = max(rows, columns) // 2
    return ScoreConfig(
        levels=tuple(sorted({level for level in (2, 4, finest) if 1 <= level <= finest} or {1}))
    )


def _install(model: nn.Module, target: PatchTarget, config: ASTConfig) -> PatchResult:
    """Replace the pruner of a model; stages that keep all tokens are left out."""
    encoder, adapter, refused = target
    stages = {block: share for block, share in config.stages.items() if share < 1.0}
    pruner = TokenPruner(encoder, adapter, replace(config, stages=stages))
    grid = _compute_usual_grid(encoder, adapter)
    pruner.add_grid(grid, next(encoder.parameters()).device)
    pruner.train(encoder.training)
    remove_pruners(model)
    install_pruner(encoder, pruner, refused)
    return PatchResult(
        family=adapter.name,
        selector=config.selector,
        stages=pruner.stages,
        grid=grid,
        tokens=tuple(pruner.count_tokens(grid, block) for block in range(len(adapter.list_blocks(encoder)))),
    )


def _install_for_budget(
    model: nn.Module, target: PatchTarget, config: ASTConfig, budget_ms: float, inputs: Inputs | None
) -> PatchResult:
    """Install the largest share that meets a budget."""
    check_positive(budget_ms=budget_ms)
    last_share = config.stages[max(config.stages)] if config.stages else 1.0
    if last_share == 1.0:
        raise InputError("`budget_ms` needs a stage whose share is below 1, to scale it")
    device = next(target.encoder.parameters()).device
    call = make_call(target.encoder, make_inputs(target)) if inputs is None else make_call(model, inputs)

    def apply(share: float) -> PatchResult:
        return _install(model, target, config.scale_stages(share))

    training = model.training
    model.eval()
    try:
        share, latency_ms = choose_share(apply, call, budget_ms, device)
    except InputError:
        remove_pruners(model)
        raise
    finally:
        model.train(training)
    return replace(apply(share), latency_ms=latency_ms)


def unpatch(model: nn.Module) -> None:
    """Restore a model that `patch` changed; other models stay as they are.

    Raises:
        InputError: The model is compiled.
    """
    _check_not_compiled(model)
    remove_pruners(model)


def get_kept_positions(model: nn.Module) -> dict[int, Tensor]:
    """Positions of the tokens that each stage kept in the last call.

    Returns:
        Stage -> positions in the grid, ascending, int64, [B, kept]. Positions count row by row and frame by
        frame; those of a TimeSformer patch by patch.

    Raises:
        InputError: The model is not patched, or was not called, or its last call was compiled.
    """
    pruners = [module for module in model.modules() if isinstance(module, TokenPruner)]
    positions = {stage: value for pruner in pruners for stage, value in pruner.positions.items()}
    if not positions:
        raise InputError("there are no positions; patch the model, and call it without torch.compile")
    return positions


def _check_not_compiled(model: nn.Module) -> None:
    # `torch.compile(model)` wraps the model; `model.compile()` sets an attribute.
    if any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    ):
        raise InputError("the model is compiled; patch the original model, then compile it")


def _compute_usual_grid(encoder: nn.Module, adapter: PatchAdapter) -> Grid:
    """Grid of an input of the usual size."""
    shape, projection = adapter.get_input_shape(encoder), adapter.get_projection(encoder)
    kernel = projection.kernel_size
    assert isinstance(kernel, tuple)
    sizes = [*shape[:-3], *shape[-2:]]
    output = [size // patch for size, patch in zip(sizes[-len(kernel) :], kernel, strict=True)]
    return adapter.measure_grid(encoder, (1, 1, *output))
