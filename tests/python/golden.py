"""Golden files: one call of an attention in Python, its results and its gradients.

A call `<name>.call.safetensors` holds

    query, key, value     the inputs
    mask.<constructor>    the tensor with which mha::Mask::<constructor> means what Python was told
    output, weights       what Python returned
    cotangent.*           random tensors of the shape of output and weights
    grad.*                gradients of sum(output * cotangent.output) + sum(weights *
                          cotangent.weights) for inputs, added masks and parameters, the latter
                          under the names that mha gives them

Its metadata are the options of the module and of the call, those at their default left out, and
`masks`: masks of equal meaning, separated by "|", each one constructors joined by "&".
"""

import zlib

import torch
from safetensors.torch import save_file


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def seed_of(name):
    """Every case has its own seed, so that adding one leaves the others as they are."""
    return zlib.crc32(name.encode()) % 100000


def generator_of(name):
    return torch.Generator().manual_seed(seed_of(name))


def randn(generator, *shape, dtype):
    return torch.randn(shape, generator=generator, dtype=dtype)


def keep_some(generator, *shape):
    """True for about two keys of three, and always for the first: no query is left without one,
    because what torch makes of such a query differs between its own paths."""
    keep = torch.rand(shape, generator=generator) < 0.67
    keep[..., 0] = True
    return keep


def save(path, tensors, metadata=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, path, {key: str(value) for key, value in (metadata or {}).items()})


def save_call(path, call, leaves, masks, metadata, parameter_gradients=dict):
    """Runs `call`, which returns the output and the weights (or None), and saves it.

    leaves: the tensors to differentiate for, by name; masks: those not among the leaves;
    parameter_gradients: called after the backward pass, gives the gradients by mha's names.
    """
    results = dict(zip(("output", "weights"), call()))
    results = {name: result for name, result in results.items() if result is not None}
    # Gradients of parameters sum over all queries: divided by the root of their number, they
    # are of unit scale like everything else.
    queries = results["output"].numel() / results["output"].size(-1)
    generator = generator_of(str(path.name))
    cotangents = {
        name: randn(generator, *result.shape, dtype=result.dtype) / queries**0.5
        for name, result in results.items()
    }
    sum((results[name] * cotangents[name]).sum() for name in results).backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()} | parameter_gradients()
    tensors = leaves | masks | results
    tensors |= {f"cotangent.{name}": tensor for name, tensor in cotangents.items()}
    tensors |= {f"grad.{name}": tensor for name, tensor in gradients.items()}
    save(path, tensors, metadata)
