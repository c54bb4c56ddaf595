"""One peer of peers.py, in a process of its own: python peer_worker.py PEER THREADS.

Writes a line {"version": ...}, then answers each line {"case", "shape", "dtype", "seconds"} on
standard input by a line {"ms": [times], "form": name of the peer's fastest form}, without times if
the peer has no form for such a case, or cannot run it on this CPU. What a peer computes is checked
against numpy before it is timed. shape is B, T, d_model, heads, key/value heads.
"""

import json
import os
import sys
import time

import numpy as np

import onnx_graphs as graphs


NOT_HERE = "not here"


class NotHere(Exception):
    """The peer would compute in another precision on this CPU than it was asked for."""


def rounded_to_bfloat16(array):
    """The nearest numbers that bfloat16 has, to even between two, still as float32."""
    bits = array.view(np.uint32)
    bits = bits + 0x7FFF + (bits >> 16 & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Problem:
    """Input, parameters and the right answer of one case; every peer gets the same numbers."""

    def __init__(self, case, shape, dtype):
        self.batch, self.length, self.width, self.heads, self.kv_heads = shape
        self.size = self.width // self.heads
        self.causal = case.endswith("_causal")
        self.is_module = case.startswith("module")
        self.trains = case == "module_train"
        self.bfloat16 = dtype == "bfloat16"
        # Wide enough for rounding, far too narrow for another mask or scale.
        self.tolerance = 5e-2 if self.bfloat16 else 1e-3
        self.decodes = case == "decode"
        self.queries = 1 if self.decodes else self.length
        self.scale = self.size**-0.5
        random = np.random.default_rng(0)

        def draw(*sizes):
            return given(random.standard_normal(sizes, dtype=np.float32))

        def given(array):
            return rounded_to_bfloat16(array) if self.bfloat16 else array

        if self.is_module:
            self.x = draw(self.batch, self.length, self.width)
            # (in, out), as the graphs multiply from the right.
            bound = self.width**-0.5
            self.weights = [given(draw(self.width, self.width) * bound) for _ in range(4)]
            self.biases = [given(draw(self.width) * bound) for _ in range(4)]
            if self.trains:
                self.gradient = draw(self.batch, self.length, self.width)
        else:
            self.q = draw(self.batch, self.heads, self.queries, self.size)
            self.k, self.v = (
                draw(self.batch, self.kv_heads, self.length, self.size) for _ in range(2)
            )

    @staticmethod
    def join(heads):
        """(B, H, T, D) -> (B, T, H * D)"""
        batch, count, length, size = heads.shape
        joined = heads.transpose(0, 2, 1, 3).reshape(batch, length, count * size)
        return np.ascontiguousarray(joined)

    def split(self, x):
        """(B, T, H * D) -> (B, H, T, D)"""
        return x.reshape(self.batch, -1, self.heads, self.size).transpose(0, 2, 1, 3)

    def blocked(self):
        """(T, T), to be added: 0 where a query may look, so low elsewhere that the weight is 0."""
        return np.triu(np.full((self.length, self.length), -1e30, np.float32), 1)

    def projected(self):
        """Query, key and value, (B, H, T, D)"""
        if not self.is_module:
            return self.q, self.k, self.v
        return [self.split(self.x @ w + b) for w, b in zip(self.weights[:3], self.biases[:3])]

    def weights_of(self, q, k):
        """The weights (T, S) of one head; one map at a time fits anywhere."""
        scores = q @ k.T * self.scale
        if self.causal:
            scores += self.blocked()
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return scores / scores.sum(-1, keepdims=True)

    def answer(self):
        """The layer's output (B, T, E), or that of the core (B, H, T, D); of training the gradient
        of the input as well, if that of the output is `gradient`."""
        q, k, v = self.projected()
        heads = np.empty((self.batch, self.heads, self.queries, self.size), np.float32)
        group = self.heads // self.kv_heads
        for n, h in np.ndindex(self.batch, self.heads):
            heads[n, h] = self.weights_of(q[n, h], k[n, h // group]) @ v[n, h // group]
        if not self.is_module:
            return (heads,)
        output = self.join(heads) @ self.weights[3] + self.biases[3]
        return (output, self.input_gradient(q, k, v)) if self.trains else (output,)

    def input_gradient(self, q, k, v):
        d_heads = self.split(self.gradient @ self.weights[3].T)
        d_projected = [np.empty_like(d_heads) for _ in range(3)]
        d_q, d_k, d_v = d_projected
        for n, h in np.ndindex(self.batch, self.heads):
            weights = self.weights_of(q[n, h], k[n, h])
            d_v[n, h] = weights.T @ d_heads[n, h]
            d_weights = d_heads[n, h] @ v[n, h].T
            d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
            d_q[n, h] = d_scores @ k[n, h] * self.scale
            d_k[n, h] = d_scores.T @ q[n, h] * self.scale
        return sum(self.join(d) @ w.T for d, w in zip(d_projected, self.weights[:3]))


# Each peer: a version, and the forms in which it can compute a problem. A form is a function that
# computes, and one that gives its last results, which are the answer's.


class OnnxRuntime:
    def __init__(self, threads):
        import onnxruntime
        self.runtime, self.version = onnxruntime, onnxruntime.__version__
        onnxruntime.set_default_logger_severity(4)
        self.options = onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = threads
        self.options.inter_op_num_threads = 1

    def forms(self, problem):
        # On the CPU its products and attention have float32 and float16, no bfloat16.
        if problem.bfloat16 or problem.trains:
            return
        if problem.decodes:
            yield "GroupQueryAttention", lambda: self.form(*graphs.grouped_query(problem))
            yield "Attention-23", lambda: self.form(*graphs.standard_attention(problem))
            return
        yield "plain", lambda: self.form(*graphs.plain(problem))
        yield "MultiHeadAttention", lambda: self.form(*graphs.multi_head(problem, packed=False))
        yield "Attention-23", lambda: self.form(*graphs.standard_attention(problem))
        if problem.is_module:
            yield "packed Attention", lambda: self.form(*graphs.packed_attention(problem))
            yield "packed MultiHeadAttention", lambda: self.form(
                *graphs.multi_head(problem, packed=True)
            )

    def form(self, graph, result, to_answer):
        session = self.runtime.InferenceSession(
            graph.model(result), self.options, providers=["CPUExecutionProvider"]
        )
        binding = session.io_binding()
        values = {
            name: self.runtime.OrtValue.ortvalue_from_numpy(array)
            for name, array in graph.inputs.items()
        }
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output(result, "cpu")
        for name, source in graph.shared.items():
            binding.bind_ortvalue_output(name, values[source])
        session.run_with_iobinding(binding)
        # From now on the same memory is written: the least that a call can cost.
        binding.bind_ortvalue_output(result, binding.get_outputs()[0])

        def run():
            session.run_with_iobinding(binding)

        run.inputs = values  # bound by address: they must live as long
        return run, lambda: (to_answer(binding.get_outputs()[0].numpy()),)


class OpenVino:
    def __init__(self, threads):
        import openvino

        self.openvino, self.version = openvino, openvino.__version__.split("-")[0]
        self.core = openvino.Core()
        self.settings = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # a pinned thread can't avoid a busy core
        }

    def forms(self, problem):
        if problem.decodes or problem.trains:
            return

        def plain():
            graph, result, to_answer = graphs.plain(problem)
            model = self.core.read_model(graph.model(result))
            return self.form(problem, model, graph.inputs, to_answer)

        yield "plain", plain
        yield "SDPA", lambda: self.form(problem, *self.fused(problem), lambda output: output)

    def fused(self, problem):
        """A model around OpenVINO's own operation for attention."""
        from openvino import opset13 as op

        def linear(x, weight, bias):
            return op.add(op.matmul(x, op.constant(weight), False, False), op.constant(bias))

        def split(x):
            shape = op.constant(
                np.array([problem.batch, problem.length, problem.heads, problem.size])
            )
            return op.transpose(
                op.reshape(x, shape, False), op.constant(np.array([0, 2, 1, 3]))
            )

        if problem.is_module:
            inputs = {"x": problem.x}
            x = op.parameter(problem.x.shape, np.float32, name="x")
            parameters = [x]
            heads = [
                split(linear(x, w, b)) for w, b in zip(problem.weights[:3], problem.biases[:3])
            ]
        else:
            inputs = {name: getattr(problem, name) for name in "qkv"}
            parameters = [
                op.parameter(array.shape, np.float32, name=name)
                for name, array in inputs.items()
            ]
            heads = parameters
        result = op.scaled_dot_product_attention(*heads, causal=problem.causal)
        if problem.is_module:
            shape = op.constant(np.array([problem.batch, problem.length, problem.width]))
            result = op.transpose(result, op.constant(np.array([0, 2, 1, 3])))
            result = op.reshape(result, shape, False)
            result = linear(result, problem.weights[3], problem.biases[3])
        return self.openvino.Model([result], parameters), inputs

    def compiled(self, problem, model):
        """In the precision that is asked for: without the hint it takes bfloat16 where the CPU has
        it, and with one for bfloat16 it emulates it, or takes float32, where the CPU has not."""
        hint = "bf16" if problem.bfloat16 else "f32"
        if problem.bfloat16:
            if "BF16" not in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
                raise NotHere("the plugin finds no bfloat16 in this CPU")
        compiled = self.core.compile_model(
            model, "CPU", {**self.settings, "INFERENCE_PRECISION_HINT": hint}
        )
        for kind, precision in self.precisions(compiled):
            if kind in self.PRODUCTS and precision != hint:
                raise NotHere(f"{kind} runs in {precision}, not in {hint}")
        return compiled

    # What the CPU plugin calls the operations that take the time.
    PRODUCTS = ("FullyConnected", "MatMul", "ScaledDotProductAttention", "ScaledAttn", "MHA")

    @staticmethod
    def precisions(compiled):
        """Kind and precision of all that the compiled model will run."""
        for operation in compiled.get_runtime_model().get_ordered_ops():
            info = operation.get_rt_info()
            yield info["layerType"].value, info["runtimePrecision"].value

    def form(self, problem, model, inputs, to_answer):
        request = self.compiled(problem, model).create_infer_request()
        for index, array in enumerate(inputs.values()):
            tensor = self.openvino.Tensor(array, shared_memory=True)
            request.set_input_tensor(index, tensor)

        def run():
            request.infer()

        run.inputs = inputs  # shared by address: they must live as long
        return run, lambda: (to_answer(request.get_output_tensor(0).data),)


class Jax:
    def __init__(self, threads):
        # Its thread pools are as large as the set of CPUs that the process may use.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax

        self.jax, self.version = jax, jax.__version__

    def forms(self, problem):
        if problem.decodes or problem.trains or problem.bfloat16:
            return
        yield "einsum", lambda: self.form(problem, self.by_einsum)
        yield "dot_product_attention", lambda: self.form(problem, self.by_function)

    def by_einsum(self, problem, q, k, v):
        scores = self.jax.numpy.einsum("bqhd,bkhd->bhqk", q, k) * problem.scale
        if problem.causal:
            scores = scores + problem.blocked()
        weights = self.jax.nn.softmax(scores, axis=-1)
        return self.jax.numpy.einsum("bhqk,bkhd->bqhd", weights, v)

    def by_function(self, problem, q, k, v):
        return self.jax.nn.dot_product_attention(q, k, v, is_causal=problem.causal)

    def form(self, problem, attention):
        put = self.jax.device_put
        split = (problem.batch, problem.length, problem.heads, problem.size)
        if problem.is_module:
            inputs = [put(problem.x), put(problem.weights), put(problem.biases)]

            def compute(x, weights, biases):
                q, k, v = (
                    (x @ w + b).reshape(split) for w, b in zip(weights[:3], biases[:3])
                )
                joined = attention(problem, q, k, v).reshape(x.shape)
                return joined @ weights[3] + biases[3]

        else:  # it wants (B, T, H, D)
            inputs = [
                put(np.ascontiguousarray(heads.transpose(0, 2, 1, 3)))
                for heads in (problem.q, problem.k, problem.v)
            ]

            def compute(q, k, v):
                return attention(problem, q, k, v)

        compiled = self.jax.jit(compute).lower(*inputs).compile()

        def run():
            self.result = compiled(*inputs).block_until_ready()

        def answer():
            result = np.asarray(self.result)
            return (result if problem.is_module else result.transpose(0, 2, 1, 3),)

        return run, answer


class Torch:
    def __init__(self, threads):
        import torch

        self.torch, self.version = torch, torch.__version__
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def forms(self, problem):
        if problem.is_module:
            yield "nn.MultiheadAttention", lambda: self.form(problem, *self.module(problem))
            yield "layer on SDPA", lambda: self.form(problem, *self.layer(problem))
        else:
            yield "SDPA", lambda: self.form(problem, self.function(problem))

    def form(self, problem, compute, *leaves):
        """Training, with the gradients of these leaves, of which the input is the first."""
        if problem.trains:
            compute = self.step(problem, compute, leaves)

        def run():
            self.result = compute()

        def answer():
            results = self.result if problem.trains else (self.result,)
            return tuple(result.float().numpy() for result in results)

        return run, answer

    def step(self, problem, compute, leaves):
        gradient = self.tensor(problem, problem.gradient)

        def step():
            with self.torch.enable_grad():
                output = compute()
            gradients = self.torch.autograd.grad(output, leaves, gradient)
            return output.detach(), gradients[0]

        return step

    def tensor(self, problem, array):
        tensor = self.torch.from_numpy(array)
        return tensor.bfloat16() if problem.bfloat16 else tensor

    def function(self, problem):
        q, k, v = (self.tensor(problem, array) for array in (problem.q, problem.k, problem.v))
        attention = self.torch.nn.functional.scaled_dot_product_attention
        grouped = problem.heads != problem.kv_heads
        return lambda: attention(q, k, v, is_causal=problem.causal, enable_gqa=grouped)

    def parameters(self, problem):
        """Weights (out, in), as torch keeps them, and biases."""
        weights = [self.tensor(problem, w.T.copy()) for w in problem.weights]
        return weights, [self.tensor(problem, b) for b in problem.biases]

    def module(self, problem):
        """A function that computes, the input and the parameters."""
        weights, biases = self.parameters(problem)
        module = self.torch.nn.MultiheadAttention(
            problem.width, problem.heads, batch_first=True, dtype=weights[0].dtype
        ).train(problem.trains)
        module.in_proj_weight.copy_(self.torch.cat(weights[:3]))
        module.in_proj_bias.copy_(self.torch.cat(biases[:3]))
        module.out_proj.weight.copy_(weights[3])
        module.out_proj.bias.copy_(biases[3])
        x = self.tensor(problem, problem.x).requires_grad_(problem.trains)
        masked = {}
        if problem.causal:
            mask = self.tensor(problem, problem.blocked())
            masked = {"attn_mask": mask, "is_causal": True}
        compute = lambda: module(x, x, x, need_weights=False, **masked)[0]
        return compute, x, *module.parameters()

    def layer(self, problem):
        """The same, of four linears and SDPA."""
        functional = self.torch.nn.functional
        weights, biases = self.parameters(problem)
        x = self.tensor(problem, problem.x)
        leaves = [x, *weights, *biases]
        for leaf in leaves:
            leaf.requires_grad_(problem.trains)

        def split(projected):
            return projected.unflatten(-1, (problem.heads, problem.size)).transpose(1, 2)

        def compute():
            q, k, v = (
                split(functional.linear(x, w, b)) for w, b in zip(weights[:3], biases[:3])
            )
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)
            return functional.linear(heads.transpose(1, 2).flatten(2), weights[3], biases[3])

        return compute, *leaves


PEERS = {"onnxruntime": OnnxRuntime, "openvino": OpenVino, "jax": Jax, "torch": Torch}


def seconds_of(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def difference(found, expected):
    """The largest, of any of the results, over the largest number of that result."""
    pairs = zip(found, expected, strict=True)
    return max(np.abs(ours - right).max() / np.abs(right).max() for ours, right in pairs)


def fastest_form(peer, problem):
    """The name and function of the peer's fastest form, among those that give the answer; without
    a function if it has no form at all, or none that this CPU can run as asked."""
    expected = problem.answer()
    best = (float("inf"), "none", None)
    failed, not_here = False, False
    for name, make in peer.forms(problem):
        try:
            run, answer = make()
            run()
            found = difference(answer(), expected)
        except NotHere as reason:
            print(f"{name} left out: {reason}", file=sys.stderr)
            not_here = True
            continue
        except Exception as error:  # a form that this version doesn't have
            print(f"{name} left out: {str(error).splitlines()[0]}", file=sys.stderr)
            failed = True
            continue
        if not found < problem.tolerance:
            print(f"{name} left out: differs from numpy by {found:.2g}", file=sys.stderr)
            failed = True
            continue
        best = min(best, (min(seconds_of(run) for _ in range(5)), name, run), key=lambda b: b[0])
    if failed and best[2] is None:
        raise RuntimeError("no form gives the answer")
    return (NOT_HERE, None) if not_here and best[2] is None else best[1:]


def main():
    peer = PEERS[sys.argv[1]](int(sys.argv[2]))
    print(json.dumps({"version": peer.version}), flush=True)
    chosen = (None, None)  # the last problem's: one at a time is kept in memory
    for line in sys.stdin:
        request = json.loads(line)
        key = (request["case"], request["shape"], request["dtype"])
        if chosen[0] != key:
            chosen = (key, fastest_form(peer, Problem(*key)))
        form, run = chosen[1]
        if run is None:
            print(json.dumps({"ms": [], "form": form}), flush=True)
            continue
        run()
        times = []
        end = time.perf_counter() + request["seconds"]
        while len(times) < 3 or time.perf_counter() < end:
            times.append(1e3 * seconds_of(run))
        print(json.dumps({"ms": times, "form": form}), flush=True)


if __name__ == "__main__":
    main()
