"""`explain`: for each convolution and linear layer, its input, its sparsity, and how it runs."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import nn

from sparseflow.spiking.accelerated import AcceleratedForward, get_accelerated_forward
from sparseflow.spiking.autotune.decision_cache import Decision
from sparseflow.spiking.graph.analysis import describe_unfused_neurons
from sparseflow.spiking.graph.layer_rules import has_library_forward
from sparseflow.spiking.graph.sites import ConvSite, Refusal
from sparseflow.spiking.profile.firing import FiringStats
from sparseflow.spiking.runtime.group_step import GroupMode

_FULL_WIDTH = 160
"""Columns of a console from which the table has all columns; below, reasons follow the table."""

_MAX_SOURCES = 3
"""Neurons that a table lists for a layer."""


@dataclass(frozen=True, kw_only=True)
class LayerExplanation:
    """One convolution or linear layer of an optimized network.

    Attributes:
        name: Module name.
        fed_by: Names of the neurons whose spikes it reads; empty if it reads something else.
        values: Kind of its input values: "binary", "integer", "sparse_real" or "dense".
        firing_rate: Fraction of non-zeros in its input on the sample; None if not fed by spikes.
        zero_block_ratio: Fraction of zero blocks in its input on the sample; None if not fed by spikes.
        warning: A warning about the layer (it fires under 0.1 %), or None.
        backend: What runs it.
        reason: Why.
        group: Name of its group; the layers of one group share its latencies.
        latency_before_ms: Median latency of the group with the network's own modules.
        latency_after_ms: Median latency of the group now.
        from_cache: The latencies were measured earlier and read from the cache on disk.
    """

    name: str
    fed_by: tuple[str, ...]
    values: str
    firing_rate: float | None
    zero_block_ratio: float | None
    warning: str | None
    backend: str
    reason: str
    group: str | None
    latency_before_ms: float | None
    latency_after_ms: float | None
    from_cache: bool


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `optimize` did to a network, layer by layer.

    Attributes:
        model: Class name of the network.
        policy: Policy of `optimize`.
        summary: One sentence about the whole network.
        layers: The convolutions and linear layers, in order.
    """

    model: str
    policy: str
    summary: str
    layers: tuple[LayerExplanation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        console = Console(width=_FULL_WIDTH, file=io.StringIO())
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_wide = options.max_width >= _FULL_WIDTH
        yield self.make_table(brief=not is_wide)
        if not is_wide:
            for layer in self.layers:
                source = f"fed by {_format_sources(layer)}; " if layer.fed_by else ""
                yield Text(f"{layer.name}: {source}{_format_reason(layer)}")

    def make_table(self, *, brief: bool = False) -> Table:
        """Make a console table; `brief` omits the columns about inputs and reasons."""
        # Text, not str: Rich parses square brackets in a str as markup, and names may contain them.
        table = Table(title=Text(f"{self.model}: {self.summary}"), title_justify="left")
        table.add_column("layer", overflow="fold")
        if not brief:
            table.add_column("fed by", overflow="fold")
            table.add_column("values", no_wrap=True)
        table.add_column("firing", justify="right", no_wrap=True)
        table.add_column("zero blocks", justify="right", no_wrap=True)
        table.add_column("backend", overflow="fold")
        table.add_column("ms before → after", justify="right", overflow="fold")
        if not brief:
            table.add_column("why", overflow="fold")
        for layer in self.layers:
            cells = (
                layer.name,
                *(() if brief else (_format_sources(layer), layer.values)),
                _format_percent(layer.firing_rate) + (" !" if layer.warning else ""),
                _format_percent(layer.zero_block_ratio),
                layer.backend,
                _format_latency(layer),
                *(() if brief else (_format_reason(layer),)),
            )
            table.add_row(*map(Text, cells))
        return table


def _format_sources(layer: LayerExplanation) -> str:
    names = layer.fed_by[:_MAX_SOURCES]
    more = len(layer.fed_by) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "") or "–"


def _format_reason(layer: LayerExplanation) -> str:
    return layer.reason + (f"; {layer.warning}" if layer.warning else "")


def _format_percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _format_latency(layer: LayerExplanation) -> str:
    if layer.latency_before_ms is None or layer.latency_after_ms is None:
        return "–"
    if layer.group not in (None, layer.name):
        return f"in {layer.group}"
    return f"{layer.latency_before_ms:.3f} → {layer.latency_after_ms:.3f}"


def explain(model: nn.Module) -> Explanation:
    """Explain what `optimize` did to `model`, one row per convolution and linear layer.

    Raises:
        ModelError: The model was not optimized.
    """
    state = get_accelerated_forward(model)
    group_of, modes = _map_convolutions(state)
    fused_groups = {g.name for plan in state.list_plans() if plan for g in plan.groups if g.match.neuron}
    rows: list[LayerExplanation] = []
    network_choice = None if state.network_decision is None else state.network_decision.choice
    uses_original, is_compiled = network_choice == "own", network_choice == "compiled"
    for site in state.graph.sites:
        group = group_of.get(site.name)
        decision = state.decisions.get(group or site.name)
        firing = state.firing.get(site.name)
        backend, reason = "not measured yet", "run the network once, or pass a sample to optimize()"
        if decision is not None:
            backend = _get_backend_name(state, group, modes.get(site.name, decision.choice))
            reason = _describe_choice(decision)
            if site.refusal in _DENSE_INPUT:
                reason = f"{site.reason}; {reason}"
            if uses_original:
                reason = f"not used, since the network runs its own code; alone: {reason}"
            elif is_compiled:
                reason = f"not used while the network runs compiled, from rest; alone: {reason}"
            if decision.from_cache:
                reason += "; measured earlier, from the cache"
        elif not site.replaceable and site.reason and site.refusal is not Refusal.NOT_A_MAP:
            backend, reason = "dense", site.reason
        elif state.policy == "measured" and state.network_decision is not None:
            backend, reason = "dense", _find_group_obstacle(state, site)
        if group not in fused_groups and (neurons := describe_unfused_neurons(state.graph, site.name)):
            reason = "; ".join([reason, *neurons])
        rows.append(
            LayerExplanation(
                name=site.name,
                fed_by=site.fed_by,
                values=site.value.kind,
                firing_rate=firing.firing_rate if firing else None,
                zero_block_ratio=firing.zero_block_ratio if firing else None,
                warning=_make_warning(firing),
                backend="dense" if uses_original else "compiled" if is_compiled else backend,
                reason=reason,
                group=group,
                latency_before_ms=decision.latency_ms.get("module") if decision else None,
                latency_after_ms=decision.latency_ms.get("module" if uses_original else decision.choice)
                if decision
                else None,
                from_cache=decision is not None and decision.from_cache,
            )
        )
    return Explanation(
        model=type(model).__name__, policy=state.policy, summary=_summarize(state), layers=tuple(rows)
    )


_DENSE_INPUT = (Refusal.NOT_SPIKE_FED, Refusal.REAL_VALUES)


def _describe_choice(decision: Decision) -> str:
    """Return the reason of a decision, with the latency of the sparse kernel if another one is used."""
    sparse_ms = decision.latency_ms.get("sparse")
    if sparse_ms is None or decision.choice == "sparse":
        return decision.reason
    selected_ms = decision.latency_ms[decision.choice]
    return f"{decision.reason}; sparse takes {sparse_ms:.3f} ms, this {selected_ms:.3f} ms"


def _find_group_obstacle(state: AcceleratedForward, site: ConvSite) -> str:
    """Return why no group contains a convolution of spikes."""
    if state.network_decision is not None and state.network_decision.choice == "layers":
        return "linear layers and Conv1d run sparse only as a part of a plan"
    if site.num_calls > 1:
        return f"called {site.num_calls} times; only layers that are called once are fused"
    if site.refusal is Refusal.NOT_A_MAP and not has_library_forward(state.model.get_submodule(site.name)):
        return "it defines its own forward pass"
    return "in no group that can be accelerated"


def _map_convolutions(state: AcceleratedForward) -> tuple[dict[str, str], dict[str, GroupMode]]:
    """Return the group and the mode of each convolution by name; one of dense values is never sparse."""
    plan = next((p for p in reversed(list(state.list_plans())) if p is not None), None)
    group_of: dict[str, str] = {}
    modes: dict[str, GroupMode] = {}
    for group in [] if plan is None else plan.groups:
        for conv in (*group.match.sources, *group.match.dense_convs):
            group_of[conv.name] = group.name
            runs_dense = group.mode == "sparse" and conv in group.match.dense_convs
            modes[conv.name] = "dense" if runs_dense else group.mode
    return group_of, modes


def _get_backend_name(state: AcceleratedForward, group: str | None, mode: str) -> str:
    if group is None:
        return mode
    names = {
        "sparse": state.backend_name,
        "dense": "dense, fused neuron",
        "fused": "fused stem",
        "module": "dense",
    }
    return names.get(mode, mode)


def _make_warning(firing: FiringStats | None) -> str | None:
    if firing is None or not firing.nearly_silent:
        return None
    return f"fires under 0.1 % ({100 * firing.firing_rate:.3f} %): its speedup is not meaningful"


def _summarize(state: AcceleratedForward) -> str:
    summary = _describe_decision(state)
    if state.disturbance is not None:
        summary += (
            f" (measured while other programs used {100 * state.disturbance:.0f} % of the CPUs and not "
            "cached; optimize again when they are idle)"
        )
    return summary


def _describe_decision(state: AcceleratedForward) -> str:
    if state.policy == "static":
        return "replaced by the static policy, not measured"
    if state.network_decision is None:
        return "not measured yet"
    if state.network_decision.choice == "own":
        return f"unchanged: {state.network_decision.reason}"
    if state.network_decision.choice == "layers":
        return state.network_decision.reason
    ms, choice = state.network_decision.latency_ms, state.network_decision.choice
    form = ", as a compiled dense network" if choice == "compiled" else ""
    return f"{ms['own']:.2f} ms → {ms[choice]:.2f} ms{form}, {state.network_decision.reason}"
