# SPDX-License-Identifier: Apache-2.0
"""What calls.py does not call, and what calls may raise beside the types of singa_lite/errors.py, with reasons."""

from __future__ import annotations

# what is not called, and why
DENIED = {
    "data.fetch_cifar10": "downloads; load_cifar10 calls it too, without a network",
    "opt.dist.DistOpt.stop_on_signals": "replaces the signal handlers of the process that fuzzes",
    "comm.base.Communicator.follow_graph": "takes a captured CUDA graph",
    "comm.base.Communicator.launch": "the half of a collective that a recorder repeats, with checked arrays",
    "comm.base.Communicator.share_stop_requests": "takes the requests of another communicator",
    "opt.base.Optimizer.run_update": "the kernel and its attributes are those of the class that calls it",
    "opt.base.Optimizer.__deepcopy__": "copy.deepcopy calls it, with what it has copied so far",
    "opt.schedule.Constant.call": "what a schedule writes; calling the schedule checks the step",
    "opt.schedule.ExponentialDecay.call": "likewise",
    **dict.fromkeys(
        [
            f"kvstore.store.KVStore.{name}"
            for name in ("save_states", "load_states", "set_states", "set_residuals", "broadcast_states")
        ],
        "the half of a Trainer's call, with functions of its own",
    ),
    **dict.fromkeys(
        [
            "autograd.Context",
            *(
                f"autograd.engine.Context.{name}"
                for name in ("run", "empty", "cast", "save", "gradient_dtype")
            ),
        ],
        "made by the engine for operators, which have checked what they give it",
    ),
    **dict.fromkeys(
        [f"tensor.as_{name}" for name in ("axes", "axis", "permutation")]
        + [f"tensor.{name}" for name in ("broadcast_shape", "product", "resolve_shape")],
        "a check that takes a shape or a number of axes of a Tensor; every function calls it",
    ),
    "tensor.core.Tensor.wrap": "makes every result, of arrays that kernels have written",
    "model.Model.run_train_one_batch": "train_one_batch, which is called, in the model's precision",
    "layer.base.Layer.check_size": "a check at every call of a layer, of two sizes of shapes",
}
# exceptions of the language's own protocols: (of what, type, why)
ACCEPTED: list[tuple[str, type[BaseException], str]] = [
    ("tensor.core.Tensor.__array__", DeprecationWarning, "numpy's own, about its names of dtypes"),
    ("tensor.core.Tensor.l1", RuntimeWarning, "numpy's own, of a sum beyond float64"),
    ("tensor.core.Tensor.l2", RuntimeWarning, "numpy's own, of a square beyond float64"),
    ("tensor.core.Tensor.__array__", RuntimeWarning, "numpy's own, of a NaN as an integer"),
    ("autograd.engine.Operator.", NotImplementedError, "of forward and backward, which a subclass writes"),
    ("layer.base.Layer.", NotImplementedError, "of forward, which a subclass writes"),
    ("model.Model.", NotImplementedError, "of forward, which a subclass writes"),
    ("gluon.utils.clip_global_norm", UserWarning, "of a norm that is not finite, as documented"),
    ("", MemoryError, "of a size that no machine has"),
]
