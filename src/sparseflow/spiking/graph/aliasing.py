"""Whether a plan may run a traced network in its own order.

A plan runs a group's convolutions only when the group's neuron is due, and hands spikes on in a form of its
own. Neither shows, unless somebody writes into a tensor that others read: then it matters who came first.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import fx, nn

from sparseflow.spiking.graph import layer_rules, rules


def conflict(
    module: fx.GraphModule,
    neurons: Mapping[str, object],
    groups: Mapping[fx.Node, fx.Node],
    spikes: Container[fx.Node],
) -> str | None:
    """What in the network would come out differently if each group ran when its output is due.

    Args:
        module: The traced network.
        neurons: Names of its neurons.
        groups: Every node that belongs to a group, with that group's output.
        spikes: Nodes whose values may be held in another form beside the tensor.

    Returns:
        A sentence, or None when the order does not matter.
    """
    modules = dict(module.named_modules())
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    memory: dict[fx.Node, set[fx.Node]] = {}
    writes: list[tuple[fx.Node, fx.Node]] = []
    for node in module.graph.nodes:
        written = _written(node, modules)
        shared = {node}.union(*(memory[source] for source in _sources(node, written, modules, neurons)))
        for member in shared:
            memory[member] = shared
        if written is not None:
            writes.append((node, written))
    due = {node: order[groups.get(node, node)] for node in order}
    for writer, written in writes:
        mine = groups.get(writer)
        if any(node.op == "placeholder" for node in memory[written]):
            return f"`{writer.name}` writes into the network's input"
        if mine is not None and groups.get(written) is not mine:
            return f"`{writer.name}` writes into `{written.name}`, which others hold too"
        copied = any(node in spikes for node in memory[written])
        names = [node for node in memory[written] if order[node] < order[writer]]
        for reader in {user for name in names for user in name.users} - {writer}:
            if order[reader] < order[writer]:
                kept = due[reader] < due[writer] or (mine is not None and groups.get(reader) is mine)
            else:
                kept = due[reader] > due[writer] and not copied
            if not kept:
                return f"`{writer.name}` writes into a tensor that `{reader.name}` reads"
    return None


def _written(node: fx.Node, modules: Mapping[str, nn.Module]) -> fx.Node | None:
    """The node whose tensor `node` writes into."""
    if isinstance(out := node.kwargs.get("out"), fx.Node):
        return out
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.op == "call_module":
        return first if getattr(modules[str(node.target)], "inplace", False) else None
    calls = node.op in ("call_function", "call_method")
    return first if calls and rules.mutates_first(node.target, node.args, node.kwargs) else None


def _sources(
    node: fx.Node, written: fx.Node | None, modules: Mapping[str, nn.Module], neurons: Mapping[str, object]
) -> list[fx.Node]:
    """The nodes with which `node` may share memory."""
    if written is not None:
        return [written]
    if node.op == "call_module":
        name = str(node.target)
        return (
            node.all_input_nodes if name not in neurons and layer_rules.layer_may_alias(modules[name]) else []
        )
    if node.op not in ("call_function", "call_method"):
        return []
    op = None if node.target is getattr else rules.operation_name(node.target)
    if not rules.may_alias(op):
        return []
    return node.all_input_nodes if op is None else node.all_input_nodes[:1]
