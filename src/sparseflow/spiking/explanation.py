"""`explain`: one row a convolution: what feeds it, how sparse that is, how it runs now and why."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from sparseflow.spiking.accelerated import Accelerated, accelerated
from sparseflow.spiking.profile.firing import Activity


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One convolution of an optimised network.

    Attributes:
        name: Module name.
        fed_by: Names of the neurons whose spikes it reads; empty when it reads something else.
        values: What its input holds: "binary", "integer", "sparse_real" or "dense".
        firing_rate: Fraction of non-zeros in its input on the sample; None when not fed by spikes.
        zero_block_ratio: Fraction of zero blocks in its input on the sample; None likewise.
        flag: A warning about the layer (it fires under 0.1 %), or None.
        backend: What runs it now.
        why: Why that.
        group: Name of the group it runs in; layers of one group share its times.
        ms_before, ms_after: Median milliseconds of the group with the network's own modules, and now.
    """

    name: str
    fed_by: tuple[str, ...]
    values: str
    firing_rate: float | None
    zero_block_ratio: float | None
    flag: str | None
    backend: str
    why: str
    group: str | None
    ms_before: float | None
    ms_after: float | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `optimize` did to a network, layer by layer."""

    model: str
    policy: str
    summary: str
    layers: tuple[LayerReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        console = Console(width=160, file=io.StringIO())
        with console.capture() as captured:
            console.print(self.__rich__())
        return captured.get().rstrip()

    def __rich__(self) -> Table:
        return self.table()

    def table(self, *, brief: bool = False) -> Table:
        """For the console; `brief` leaves out what feeds a layer and why it runs as it does."""
        # Text, not str: Rich reads square brackets in a str as commands, and names may hold them.
        table = Table(title=Text(f"{self.model}: {self.summary}"), title_justify="left")
        table.add_column("layer", no_wrap=True)
        if not brief:
            table.add_column("fed by")
            table.add_column("values")
        table.add_column("firing", justify="right", no_wrap=True)
        table.add_column("zero blocks", justify="right", no_wrap=True)
        table.add_column("backend")
        table.add_column("ms before → after", justify="right", no_wrap=True)
        if not brief:
            table.add_column("why")
        for layer in self.layers:
            source = (", ".join(layer.fed_by) or "–", layer.values)
            reason = layer.why + (f"; {layer.flag}" if layer.flag else "")
            cells = (
                layer.name,
                *(() if brief else source),
                _percent(layer.firing_rate) + (" !" if layer.flag else ""),
                _percent(layer.zero_block_ratio),
                layer.backend,
                _times(layer),
                *(() if brief else (reason,)),
            )
            table.add_row(*map(Text, cells))
        return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _times(layer: LayerReport) -> str:
    if layer.ms_before is None or layer.ms_after is None:
        return "–"
    if layer.group not in (None, layer.name):
        return f"in {layer.group}"
    return f"{layer.ms_before:.3f} → {layer.ms_after:.3f}"


def explain(model: nn.Module) -> Explanation:
    """What `optimize` did to `model`, one row a convolution.

    Raises:
        ModelError: The model was not optimised.
    """
    state = accelerated(model)
    group_of, ways = _groups(state)
    rows: list[LayerReport] = []
    for site in state.graph.sites:
        group = group_of.get(site.name)
        decision = state.decisions.get(group or site.name)
        seen = state.activities.get(site.name)
        backend, why = "not measured yet", "run the network once, or give optimize() a sample"
        if decision is not None:
            way = ways.get(group or "", decision.way)
            # A group's stem runs dense, whatever its convolutions of spikes run on.
            way = "dense" if way == "sparse" and not site.replaceable else way
            backend = _backend_name(state, site.name, group, way)
            why = decision.why
        elif not site.replaceable and site.reason:
            backend, why = "dense", site.reason
        elif state.policy == "measured" and state.whole is not None:
            backend, why = "dense", "in no group that could run faster"
        whole_off = state.whole is not None and state.whole.way == "own"
        rows.append(
            LayerReport(
                name=site.name,
                fed_by=site.fed_by,
                values=site.value.kind,
                firing_rate=seen.firing_rate if seen else None,
                zero_block_ratio=seen.zero_block_ratio if seen else None,
                flag=_flag(seen),
                backend="dense" if whole_off else backend,
                why=why,
                group=group,
                ms_before=decision.ms.get("module") if decision else None,
                ms_after=decision.ms.get("module" if whole_off else decision.way) if decision else None,
            )
        )
    return Explanation(
        model=type(model).__name__, policy=state.policy, summary=_summary(state), layers=tuple(rows)
    )


def _groups(state: Accelerated) -> tuple[dict[str, str], dict[str, str]]:
    plan = next((p for p in reversed(list(state.plans())) if p is not None), None)
    if plan is None:
        return {}, {}
    group_of = {
        conv.name: group.name
        for group in plan.groups
        for conv in (*group.match.sources, *group.match.dense_convs)
    }
    return group_of, {group.name: group.way for group in plan.groups}


def _backend_name(state: Accelerated, site: str, group: str | None, way: str) -> str:
    if group is None:
        return way
    names = {"sparse": state.backend_name, "dense": "dense, fused neuron", "module": "dense"}
    return names.get(way, way)


def _flag(activity: Activity | None) -> str | None:
    if activity is None or not activity.nearly_silent:
        return None
    return f"fires under 0.1 % ({100 * activity.firing_rate:.3f} %): its speed-up says little"


def _summary(state: Accelerated) -> str:
    if state.policy == "static":
        return "replaced by the static rule, not measured"
    if state.whole is None:
        return "not measured yet"
    if state.whole.way == "own":
        return f"left as it was: {state.whole.why}"
    if state.whole.way == "layers":
        return state.whole.why
    ms = state.whole.ms
    return f"{ms['own']:.2f} ms → {ms['plan']:.2f} ms, {state.whole.why}"
