"""Attention as ONNX graphs, in the forms that runtimes may know how to run fast.

Each function takes a Problem (see peer_worker.py) and gives the graph, the name of its result and
a function that brings the result into the answer's shape.
"""

import numpy as np
import onnx


class OnnxGraph:
    """An ONNX model put together line by line."""

    def __init__(self, opset):
        self.opset, self.nodes, self.constants, self.inputs = opset, [], [], {}
        self.shared = {}  # further results, each in the memory of the input it is given here

    def input(self, name, array):
        self.inputs[name] = array
        return name

    def constant(self, array):
        name = f"constant_{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(self, kind, *inputs, domain="", outputs=1, **attributes):
        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(
            onnx.helper.make_node(kind, list(inputs), names, domain=domain, **attributes)
        )
        return names[0] if outputs == 1 else names

    def linear(self, x, weight, bias):
        return self.node("Add", self.node("MatMul", x, self.constant(weight)), self.constant(bias))

    def model(self, result):
        def info(name, shape, dtype=np.dtype(np.float32)):
            element = onnx.helper.np_dtype_to_tensor_dtype(dtype)
            return onnx.helper.make_tensor_value_info(name, element, shape)

        graph = onnx.helper.make_graph(
            self.nodes,
            "attention",
            [info(name, array.shape, array.dtype) for name, array in self.inputs.items()],
            [info(name, None) for name in [result, *self.shared]],
            self.constants,
        )
        opsets = [onnx.helper.make_opsetid("", self.opset)]
        opsets.append(onnx.helper.make_opsetid("com.microsoft", 1))
        model = onnx.helper.make_model(graph, opset_imports=opsets)
        model.ir_version = 10  # newer ones say nothing that is used here
        return model.SerializeToString()


def plain(problem):
    """Products and a softmax, as exporters write attention."""
    graph = OnnxGraph(18)

    def split(x):
        shape = np.array([problem.batch, problem.length, problem.heads, problem.size])
        return graph.node(
            "Transpose", graph.node("Reshape", x, graph.constant(shape)), perm=[0, 2, 1, 3]
        )

    if problem.is_module:
        x = graph.input("x", problem.x)
        q, k, v = (
            split(graph.linear(x, w, b)) for w, b in zip(problem.weights[:3], problem.biases[:3])
        )
    else:
        q, k, v = (graph.input(name, getattr(problem, name)) for name in "qkv")
    q = graph.node("Mul", q, graph.constant(np.array(problem.scale, np.float32)))
    scores = graph.node("MatMul", q, graph.node("Transpose", k, perm=[0, 1, 3, 2]))
    if problem.causal:
        scores = graph.node("Add", scores, graph.constant(problem.blocked()))
    result = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
    if problem.is_module:
        shape = np.array([problem.batch, problem.length, problem.width])
        joined = graph.node("Transpose", result, perm=[0, 2, 1, 3])
        joined = graph.node("Reshape", joined, graph.constant(shape))
        result = graph.linear(joined, problem.weights[3], problem.biases[3])
    return graph, result, lambda output: output


def multi_head(problem, packed):
    """com.microsoft.MultiHeadAttention, after three projections or a packed one."""
    graph = OnnxGraph(18)
    if not problem.is_module:
        q = graph.input("q", problem.join(problem.q))
        k, v = graph.input("k", problem.k), graph.input("v", problem.v)
    elif packed:
        x = graph.input("x", problem.x)
        weight, bias = np.hstack(problem.weights[:3]), np.hstack(problem.biases[:3])
        sizes = graph.constant(np.array([problem.width] * 3))
        q, k, v = graph.node("Split", graph.linear(x, weight, bias), sizes, outputs=3, axis=-1)
    else:
        x = graph.input("x", problem.x)
        q, k, v = (
            graph.linear(x, w, b) for w, b in zip(problem.weights[:3], problem.biases[:3])
        )
    result = graph.node(
        "MultiHeadAttention",
        *(q, k, v),
        domain="com.microsoft",
        num_heads=problem.heads,
        unidirectional=int(problem.causal),
    )
    if problem.is_module:
        result = graph.linear(result, problem.weights[3], problem.biases[3])
        return graph, result, lambda output: output
    return graph, result, problem.split


def packed_attention(problem):
    """com.microsoft.Attention, which projects as well."""
    graph = OnnxGraph(18)
    result = graph.node(
        "Attention",
        graph.input("x", problem.x),
        graph.constant(np.hstack(problem.weights[:3])),
        graph.constant(np.hstack(problem.biases[:3])),
        domain="com.microsoft",
        num_heads=problem.heads,
        unidirectional=int(problem.causal),
    )
    result = graph.linear(result, problem.weights[3], problem.biases[3])
    return graph, result, lambda output: output


def grouped_query(problem):
    """com.microsoft.GroupQueryAttention: the last key and value join a cache that has room."""
    graph = OnnxGraph(18)
    last = np.full((problem.batch,), problem.length - 1, np.int32)
    cache = [graph.input(name, getattr(problem, name[-1])) for name in ("past_k", "past_v")]
    newest = [problem.join(heads[:, :, -1:]) for heads in (problem.k, problem.v)]
    result, *present = graph.node(
        "GroupQueryAttention",
        graph.input("q", problem.join(problem.q)),
        *(graph.input(name, array) for name, array in zip("kv", newest)),
        *cache,
        graph.input("last", last),
        graph.constant(np.array(problem.length, np.int32)),
        domain="com.microsoft",
        outputs=3,
        num_heads=problem.heads,
        kv_num_heads=problem.kv_heads,
        scale=problem.scale,
    )
    graph.shared = dict(zip(present, cache))
    return graph, result, problem.split


def standard_attention(problem):
    """The Attention of ONNX itself."""
    graph = OnnxGraph(23)
    heads = {}
    if problem.is_module:
        x = graph.input("x", problem.x)
        inputs = [
            graph.linear(x, w, b) for w, b in zip(problem.weights[:3], problem.biases[:3])
        ]
        heads = {"q_num_heads": problem.heads, "kv_num_heads": problem.heads}
    else:
        inputs = [graph.input(name, getattr(problem, name)) for name in "qkv"]
    result = graph.node("Attention", *inputs, is_causal=int(problem.causal), **heads)
    if problem.is_module:
        result = graph.linear(result, problem.weights[3], problem.biases[3])
    return graph, result, lambda output: output
