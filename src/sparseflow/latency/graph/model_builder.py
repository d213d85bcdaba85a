"""`ModelBuilder`: ONNX models of a few nodes, written with `onnx.helper`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require

if TYPE_CHECKING:
    import onnx

OPSET = 17
MICROSOFT = "com.microsoft"
"""Domain of onnxruntime's own operators."""


class ModelBuilder:
    """Inputs, constants and nodes of one model; tensors are named in the order of their addition."""

    def __init__(self) -> None:
        self._onnx = require("onnx", "latency")
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._constants: list[Any] = []

    def add_input(self, shape: Sequence[int], dtype: str = "float32") -> str:
        """Add an input of the model and return its name."""
        name = f"x{len(self._inputs)}"
        element_type = self._onnx.TensorProto.DataType.Value({"float32": "FLOAT"}.get(dtype, dtype.upper()))
        self._inputs.append(self._onnx.helper.make_tensor_value_info(name, element_type, shape))
        return name

    def add_constant(self, value: Any, dtype: str | None = None) -> str:
        """Add an initializer, by default of the array's type, and return its name."""
        import numpy as np

        name = f"w{len(self._constants)}"
        self._constants.append(self._onnx.numpy_helper.from_array(np.asarray(value, dtype=dtype), name))
        return name

    def add_node(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        return self.add_split_node(op, *inputs, outputs=1, domain=domain, **attributes)[0]

    def add_split_node(
        self, op: str, *inputs: str, outputs: int, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node and return the names of all its outputs."""
        names = [f"t{len(self._nodes)}_{position}" for position in range(outputs)]
        self._nodes.append(self._onnx.helper.make_node(op, list(inputs), names, domain=domain, **attributes))
        return names

    def build(self, *outputs: str) -> onnx.ModelProto:
        """Return the model with these outputs, whose types onnxruntime infers."""
        helper = self._onnx.helper
        graph = helper.make_graph(
            self._nodes,
            "graph",
            self._inputs,
            [self._onnx.ValueInfoProto(name=name) for name in outputs],
            self._constants,
        )
        imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)
