"""Shared memory between nodes of a traced network, and hazards of running it in another order.

A plan runs a group's convolutions only when the group's neuron is due, and passes spikes on in native form.
This is not observable unless an operation writes into a tensor that others read: then the order matters.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import fx, nn

from sparseflow.spiking.graph import layer_rules, rules


def find_written_node(node: fx.Node, modules: Mapping[str, nn.Module]) -> fx.Node | None:
    """Return the node whose tensor `node` writes into."""
    if isinstance(out := node.kwargs.get("out"), fx.Node):
        return out
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.op == "call_module":
        return first if getattr(modules[str(node.target)], "inplace", False) else None
    calls = node.op in ("call_function", "call_method")
    return first if calls and rules.mutates_first_argument(node.target, node.args, node.kwargs) else None


def list_aliased_inputs(
    node: fx.Node, written: fx.Node | None, modules: Mapping[str, nn.Module], neurons: Container[str]
) -> list[fx.Node]:
    """List the inputs with which `node` may share memory; `written` is the node it writes into."""
    if written is not None:
        return [written]
    inputs = node.all_input_nodes
    if node.op == "call_module":
        name = str(node.target)
        return inputs if name not in neurons and layer_rules.layer_may_alias(modules[name]) else []
    if node.op not in ("call_function", "call_method"):
        return []
    op = None if node.target is getattr else rules.get_operation_name(node.target)
    if not rules.may_alias(op):
        return []
    return inputs if op is None else inputs[:1]


def find_write_hazard(
    module: fx.GraphModule,
    neurons: Container[str],
    groups: Mapping[fx.Node, fx.Node],
    spikes: Container[fx.Node],
) -> str | None:
    """Return what would differ if each group ran when its output is due (a sentence), or None.

    Args:
        module: The traced network.
        neurons: Names of its neurons.
        groups: Each node that belongs to a group -> the group's output.
        spikes: Nodes whose values may be held in native form in addition to the tensor.
    """
    modules = dict(module.named_modules())
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    memory: dict[fx.Node, set[fx.Node]] = {}
    writes: list[tuple[fx.Node, fx.Node]] = []
    for node in module.graph.nodes:
        written = find_written_node(node, modules)
        sources = list_aliased_inputs(node, written, modules, neurons)
        aliases = {node}.union(*(memory[source] for source in sources))
        for member in aliases:
            memory[member] = aliases
        if written is not None:
            writes.append((node, written))
    run_position = {node: order[groups.get(node, node)] for node in order}
    for writer, written in writes:
        writer_group = groups.get(writer)
        if any(node.op == "placeholder" for node in memory[written]):
            return f"`{writer.name}` writes into the network's input"
        if writer_group is not None and groups.get(written) is not writer_group:
            return f"`{writer.name}` writes into `{written.name}`, which is used outside its group"
        has_copy = any(node in spikes for node in memory[written])
        aliases = [node for node in memory[written] if order[node] < order[writer]]
        for reader in {user for alias in aliases for user in alias.users} - {writer}:
            if order[reader] < order[writer]:
                same_group = writer_group is not None and groups.get(reader) is writer_group
                preserved = run_position[reader] < run_position[writer] or same_group
            else:
                preserved = run_position[reader] > run_position[writer] and not has_copy
            if not preserved:
                return f"`{writer.name}` writes into a tensor that `{reader.name}` reads"
    return None
