"""Graphs as onnxruntime executes them.

- `session`: sessions of a chosen execution provider.
- `onnx_file`: validated reading of ONNX files.
- `kernels`, `work`: kernel identities, names, FLOPs and bytes.
- `optimization`, `analysis`: the optimized graph and its nodes.
- `extraction`: each kernel as its own model.
- `networks`, `zoo`: networks and their export.
"""
