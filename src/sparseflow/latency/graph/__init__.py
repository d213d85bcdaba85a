"""Graphs as onnxruntime executes them.

- `session`: sessions of a chosen execution provider.
- `onnx_file`, `sources`: validated reading of ONNX files; modules of torch and folders of Hugging Face.
- `inputs`, `dimensions`: values of inputs, and shapes from open dimensions.
- `kernels`, `work`: kernel identities, names, FLOPs and bytes.
- `optimization`, `analysis`: the optimized graph and its nodes.
- `extraction`: each kernel as its own model.
- `networks`, `zoo`: networks and their export.
- `model_builder`, `synthetic_kernels`: models of a few nodes; kernels of random sizes of all operators.
"""
