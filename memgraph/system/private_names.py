"""Check at first use that torch has the private names that memgraph uses.

    torch 2.16 has no torch._C._storage_Use_Count   ->   TorchVersionError: torch 2.16.0 lacks what memgraph uses: ...

torch may rename or change them in any release. Without this check, a missing name would fail in the middle of a step.
`tests/memgraph/system/test_private_names.py` compares these lists with the names in the sources.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ..errors import TorchVersionError
from .user_warning import warn_user

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")  # `make versions` runs the core tests on each

NAMES: Mapping[str, str] = {
    "torch._assert_async": "an index out of range ends a step on a GPU, without a wait of the host",
    # Tracing
    "torch._subclasses.FakeTensor": "the class of a trace's tensors",
    "torch._subclasses.FakeTensorMode": "traces run on fake tensors",
    "torch._subclasses.fake_tensor.FakeTensor": "the same class, by its own module",
    "torch._subclasses.fake_tensor.FakeTensorMode": "the same class, by its own module",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "tells apart why a model can't be traced",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "tells apart why a model can't be traced",
    "torch._prims_common.suggest_memory_format": "kernels choose between contiguous and channels last by it",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": "tells apart why a model can't be traced",
    "torch._subclasses.functional_tensor.FunctionalTensorMode": "the second trace has no ops in place",
    "torch._subclasses.functional_tensor.disable_functional_mode": "ops that only check run beneath the second trace",
    "torch._functorch._aot_autograd.functional_utils.from_fun": "takes tensors out of the second trace",
    "torch._functorch._aot_autograd.functional_utils.to_fun": "puts tensors into the second trace",
    "torch._guards.active_fake_mode": "a plain tensor that backward meets in a trace is not the trace's own",
    "torch._C._set_grad_enabled": "the grad mode that forward leaves is put back",
    "torch._guards.TracingContext": "kernels that a user compiled want to find the trace's fake mode",
    "torch._guards.tracing": "kernels that a user compiled want to find the trace's fake mode",
    "torch._dispatch.python.enable_python_dispatcher": "descriptions of ops in Python take symbols for sizes",
    "torch._dynamo.source.ConstantSource": "the name of a symbol for a size",
    "torch._C._dynamo.guards.dict_version": "a dict that was not written to is not read again",
    "torch._C._dynamo.guards.TensorGuards": "the parameters of a call are compared with those of the last one",
    "torch._dynamo": "modules that a user compiled run as they are while a step is traced",
    "torch._dynamo.OptimizedModule": "recognizes modules that a user compiled",
    "torch._dynamo.config": "holds `error_on_nested_fx_trace`",
    "torch._dynamo.config.patch": "switches `error_on_nested_fx_trace` off during a trace",
    "torch._dynamo.config.error_on_nested_fx_trace": "would refuse modules that a user compiled",
    "torch._C._autograd._saved_tensors_hooks_set_tracing": "the caller's hooks for saved tensors don't see fake ones",
    "torch.fx._symbolic_trace": "holds the next two",
    "torch.fx._symbolic_trace._orig_module_call": "a replaced nn.Module.__call__ runs in a trace too",
    "torch.fx._symbolic_trace._orig_module_getattr": "a replaced nn.Module.__getattr__ runs in a trace too",
    "torch._C._AutoDispatchBelowAutograd": "ops of a graph run without going through autograd",
    "torch._C._DisableAutocast": "casts stand in the graph already",
    "torch._C._disabled_torch_function_impl": "fused layers of nn are taken apart as for a subclass of Tensor",
    "torch._C.ScriptFunction": "functions that TorchScript has compiled are traced as Python",
    "torch._C.Generator": "tells a generator from others while a forward that makes one is refused",
    "torch.overrides._get_current_function_mode_stack": "a mode that changes functions of torch is refused",
    "torch.nn.utils.parametrize._cache_enabled": "a block of parametrize.cached() is refused",
    "torch.utils._device.DeviceContext": "the mode of a default device, which is not refused",
    "torch._compile": "a wrapper of torch.random, which is not the caller",
    "torch._dynamo.eval_frame": "a wrapper of torch.random, which is not the caller",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees the ops of a call in their order",
    "torch.utils._python_dispatch._disable_current_modes": "what is known during a trace is computed on real tensors",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "such tensors are refused",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": "what a forward for values writes is restored",
    "torch.utils._pytree": "arguments and results are flattened as torch's own tools do",
    "torch.utils._pytree.tree_flatten": "arguments and results are flattened as torch's own tools do",
    "torch.utils._pytree.tree_leaves": "arguments and results are flattened as torch's own tools do",
    "torch.utils._pytree.tree_map": "arguments and results are flattened as torch's own tools do",
    "torch.utils._pytree.tree_map_only": "finds the floats among an op's arguments",
    "torch.utils._pytree.tree_unflatten": "arguments and results are flattened as torch's own tools do",
    "torch.nn.modules.batchnorm._NormBase": "names the remedy where a norm has no momentum",
    # Opaque parts
    "torch._C._ForceDispatchKeyGuard": "a part that runs as it is has autograd, which a step turns off",
    "torch._C._dispatch_tls_local_include_set": "the dispatch keys around a part that runs as it is",
    "torch._C._dispatch_tls_local_exclude_set": "the dispatch keys around a part that runs as it is",
    "torch._C.DispatchKey": "autograd's dispatch keys",
    "torch._C.DispatchKeySet": "autograd's dispatch keys",
    # Graphs
    "torch._ops": "holds OpOverload",
    "torch._ops.OpOverload": "tells ops of torch from other functions in a graph",
    "torch.fx.graph._BoxedCodeGen": "values that a half of a step reads are freed after their last use",
    "torch._neg_view": "ops are priced on tensors that are as lazily negated as the step's",
    "torch._VF": "holds torch's own functions: ops are called by them, and those that pack rows are replaced",
    "torch._C._nn": "holds torch's own functions of nn, by which ops are called",
    "torch._C.DisableTorchFunction": "the plain `tolist` runs, not the one that a trace puts in its place",
    "torch.ops.aten._log_softmax": "runs in parts of the rows, in a slice",
    "torch.ops.aten._log_softmax_backward_data": "runs in parts of the rows, in a slice",
    "torch.ops.aten._softmax": "runs in parts of the rows, in a slice",
    "torch.ops.aten._softmax_backward_data": "runs in parts of the rows, in a slice",
    "torch.ops.aten._to_copy": "casts a part of a slice",
    "torch.ops.aten._pack_padded_sequence": "packs rows of several lengths",
    "torch.ops.aten._pad_packed_sequence": "pads rows of several lengths",
    "torch.ops.aten._ctc_loss": "keeps as much for backward as the longest target needs",
    "torch.ops.aten._native_batch_norm_legit_functional": "batch norm in training, made functional",
    "torch.ops.aten._native_batch_norm_legit_functional.default": "batch norm in training, made functional",
    "torch.ops.aten._linalg_svd": "singular values without vectors, as eager computes them where it needs no gradient",
    "torch.ops.aten._linalg_eigh": "eigenvalues without vectors, as eager computes them where it needs no gradient",
    "torch.ops.aten._local_scalar_dense": "`.item()` of what is known during a trace",
    "torch.ops.aten._unsafe_view": "a product in other sizes, into which forward may write",
    "torch.ops.aten._unique": "its sizes depend on values",
    "torch.ops.aten._unique2": "its sizes depend on values",
    "torch.ops.aten._index_put_impl_": "masks among its indices have sizes that depend on values",
    # Running
    "torch._C._autograd._get_current_graph_task_keep_graph": "a backward with retain_graph=True keeps what it reads",
    "torch._C._will_engine_execute_node": "gradients that backward(inputs=...) does not ask for are not written",
    "torch._C._functorch.peek_interpreter_stack": "a compiled module under torch.func is refused",
    "torch._C._storage_Use_Count": "gradients with other references are not overwritten",
    "torch._foreach_copy_": "many small copies cost one launch",
    "torch._debug_has_internal_overlap": "a parameter whose elements overlap can't be spread over ranks",
    "torch.cuda._is_in_bad_fork": "a forked child must not touch memory that its parent has pinned",
    "torch.autograd.Variable._execution_engine": "tells when a backward that calls share has ended",
    "torch.autograd.Variable._execution_engine.queue_callback": "tells when a backward that calls share has ended",
    "torch.optim.optimizer._global_optimizer_post_hooks": "an update in windows calls the hooks that a step calls",
    # Measuring, and the signature of a call
    "torch._C._autograd._profiler_enabled": "a second profiler would end the caller's",
    "torch._C._autograd._enable_profiler_legacy": "sees what one thread allocates beside the caller's profiler",
    "torch._C._autograd._disable_profiler_legacy": "sees what one thread allocates beside the caller's profiler",
    "torch._C._profiler.ProfilerConfig": "the thread's profiler is told to see memory",
    "torch._C._profiler.ProfilerState": "the thread's profiler is told to see memory",
    "torch._C._profiler._ExperimentalConfig": "the thread's profiler is told to see memory",
    "torch.autograd.profiler._is_profiler_enabled": "a profiler of another thread is seen too",
    "torch._C._profiler._ExtraFields_Allocation": "each allocation of a profile, with its address",
    "torch._C._profiler._ProfilerEvent": "each event of a profile",
    "torch._C._get_fp32_precision_getter": "kernels depend on it, and so do bits and prices",
    "torch._C._get_math_sdp_allow_fp16_bf16_reduction": "kernels depend on it, and so do bits and prices",
    "torch._C._get_cublas_allow_bf16_reduced_precision_reduction": "forward may ask for it",
    "torch._C._get_cublas_allow_fp16_reduced_precision_reduction": "forward may ask for it",
    "torch._C._get_mkldnn_deterministic": "forward may ask for it",
    "torch._C._get_mkldnn_enabled": "kernels depend on it, and so do bits and prices",
    "torch._C._get_nnpack_enabled": "kernels depend on it, and so do bits and prices",
    "torch._C._get_sdp_priority_order": "kernels depend on it, and so do bits and prices",
}

CUDA_NAMES: Mapping[str, str] = {  # of a torch that was built for GPUs
    "torch._C._cuda_endAllocateToPool": "the allocator leaves the pool of a CUDA graph whose recording has failed",
    "torch._C._cuda_isHistoryEnabled": "a history that the caller records is left alone",
    "torch.cuda.memory._record_memory_history": "the requests of a step's ops are noted",
    "torch.cuda.memory._snapshot": "has the history of requests",
}

LATE_NAMES: Mapping[str, str] = {  # looked up at first use, since their modules take long to import
    "torch._inductor.compile_fx.compile_fx_inner": "compiles a part of a graph",
    "torch._inductor.decomposition.select_decomp_table": "the ops that Inductor wants in place of others",
    "torch._inductor.custom_graph_pass.CustomKnapsackSolver": "the class of solvers that torch.compile takes",
    "torch._functorch.partitioners.estimate_runtime": "the flops of an op whose sizes are symbols",
    "torch.distributed.checkpoint._nested_dict.flatten_state_dict": "a state is refused that a folder would change",
}

# Attributes of classes, or of their instances in `_samples`.
ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "torch.Tensor": {
        "_base": "tells a view from its base",
        "_version": "notices what was changed in place before backward reads it",
        "_nnz": "the rows that a sparse gradient has",
        "_is_view": "a view holds a reference to its base",
        "_use_count": "gradients with other references stay live after backward has read them",
        "_backward_hooks": "gradients of parameters with hooks go by way of autograd",
        "_post_accumulate_grad_hooks": "gradients of parameters with hooks go by way of autograd",
    },
    "torch.UntypedStorage": {"_cdata": "bytes are counted once for each storage, however many tensors share it"},
    "torch.nn.BatchNorm1d": {"_check_input_dim": "a deferred BatchNorm takes what the plain one takes"},
    "torch.nn.Module": {
        "_apply": "`.to()` of a compiled module moves the module that it wraps",
        "_compiled_call_impl": "a budget for a module that torch.compile runs is refused",
        "_forward_pre_hooks": "hooks are part of what tells one call from another",
        "_backward_hooks": "hooks of a submodule would run once, when it is captured",
        "_backward_pre_hooks": "hooks of a submodule would run once, when it is captured",
    },
    "torch.nn.modules.module": {
        "_global_forward_hooks": "hooks are part of what tells one call from another",
        "_global_backward_hooks": "hooks are part of what tells one call from another",
        "_global_backward_pre_hooks": "hooks are part of what tells one call from another",
        "_global_forward_pre_hooks": "hooks are part of what tells one call from another",
    },
    "torch.nn.utils.stateless": {"_reparametrize_module": "forward runs on the trace's parameters"},
    "torch.autograd.forward_ad": {"_current_level": "forward-mode differentiation of a compiled module is refused"},
    "torch.autograd.graph.Node": {"_sequence_nr": "an op of backward gets the source line of its forward"},
    "torch.autograd.function.BackwardCFunction": {"_forward_cls": "tells the capture's own functions from the model's"},
    "torch.optim.Optimizer": {
        "_optimizer_step_pre_hooks": "an update in windows calls the hooks that a step calls",
        "_optimizer_step_post_hooks": "an update in windows calls the hooks that a step calls",
        "_optimizer_load_state_dict_pre_hooks": "a sharded state calls the hooks that a plain one calls",
        "_optimizer_load_state_dict_post_hooks": "a sharded state calls the hooks that a plain one calls",
    },
    "torch.amp.GradScaler": {"_unscale_grads_": "ranks agree on which gradients are infinite"},
    "torch.fx.Graph": {"_codegen": "a half of a graph runs with the codegen of that half"},
    "torch.fx.graph._BoxedCodeGen": {"_gen_python_code": "ops are called without what Python adds to each call"},
    "torch.fx.Node": {"_rename": "names of a graph are those of its trace"},
    "torch.fx.Interpreter": {"_set_current_node": "ops that only check keep the notes of their node"},
    "torch._ops.OpOverload": {
        "_schema": "says what an op reads, draws and writes to",
        "_op": "ops are called without what Python adds to each call",
        "_opname": "finds the op that does the same, but not in place",
        "_overloadname": "finds the op that does the same in place",
    },
    "torch._subclasses.FakeTensorMode": {
        "dispatch": "returns the values that are known during a trace",
        "cache_enabled": "cached results may lack bytes of their storages",
    },
}

DISTRIBUTED: Mapping[str, Mapping[str, str]] = {  # the same, of a torch that was built with torch.distributed
    "torch.distributed.ProcessGroup": {
        "_device_types": "the devices on which ranks can report a missing rank",
        "_get_backend": "only gloo names the missing ranks",
    },
    "torch.nn.parallel.DistributedDataParallel": {
        "_get_active_ddp_module": "the buckets of the one that calls a compiled module count",
    },
    "torch.distributed.checkpoint.FileSystemReader": {
        "_get_metadata_path": "the metadata of a checkpoint is read without running code from it",
    },
}

# Parameters with which Python functions among these are called or overridden.
CALLS: Mapping[str, tuple[str, ...]] = {
    "torch._subclasses.FakeTensorMode.dispatch": ("self", "func", "types", "args", "kwargs"),
    "torch._subclasses.functional_tensor.FunctionalTensorMode": ("pre_dispatch", "_allow_token_discovery"),
    "torch.nn.utils.stateless._reparametrize_module": ("module", "parameters_and_buffers", "tie_weights"),
    "torch.amp.GradScaler._unscale_grads_": ("self", "optimizer", "inv_scale", "found_inf", "allow_fp16"),
}


def check() -> None:
    """Look up the private names of torch; warn about a version of torch that was never tested.

    Raises:
        TorchVersionError: a name is missing, or has other parameters.
    """
    version = torch.__version__.partition("+")[0]
    if lacking := missing():
        raise TorchVersionError(f"torch {version} lacks what memgraph uses:\n{lacking}\n{_remedy()}")
    if ".".join(version.split(".")[:2]) not in TESTED:
        warn_user(f"memgraph was never tested with torch {version}, though it has every name that is used. {_remedy()}")


def missing() -> str:
    """Return a line with the reason for each name that is missing or has other parameters."""
    names = {**NAMES, **(CUDA_NAMES if torch.backends.cuda.is_built() else {})}
    owners = {**ATTRIBUTES, **(DISTRIBUTED if torch.distributed.is_available() else {})}
    lines = [f"  {name} ({reason})" for name, reason in names.items() if not _is_there(name)]
    for owner, attributes in owners.items():
        lines += [f"  {owner}.{name} ({why})" for name, why in attributes.items() if not _has(owner, name)]
    lines += [
        f"  {name} that takes ({', '.join(wanted)})" for name, wanted in CALLS.items() if not _takes(name, wanted)
    ]
    return "\n".join(lines)


def _remedy() -> str:
    newest = [*map(int, TESTED[-1].split("."))]
    wanted = f"torch>={TESTED[0]},<{newest[0]}.{newest[1] + 1}"
    return f"It is known to work with torch {', '.join(TESTED)}: pip install '{wanted}'"


def _look_up(name: str) -> Any:
    """Return the object with a dotted name, and import the modules on the path.

    Raises:
        AttributeError, ImportError: there is no such object.
    """
    value: Any = torch
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 1):
        is_imported = hasattr(value, part) or not hasattr(value, "__path__")
        value = getattr(value, part) if is_imported else importlib.import_module(".".join(parts[: i + 1]))
    return value


def _is_there(name: str) -> bool:
    try:
        _look_up(name)
    except (AttributeError, ImportError):
        return False
    return True


def _has(owner: str, name: str) -> bool:
    """Return True if the class or an instance of it has the attribute."""
    try:
        return hasattr(_look_up(owner), name) or hasattr(_samples().get(owner), name)
    except (AttributeError, ImportError):
        return False


@cache
def _samples() -> dict[str, object]:
    return {
        "torch.UntypedStorage": torch.UntypedStorage(0),
        "torch.nn.Module": torch.nn.Module(),
        "torch.optim.Optimizer": torch.optim.SGD([torch.empty(0, device="cpu")]),
        "torch.fx.Graph": torch.fx.Graph(),
        "torch.autograd.graph.Node": torch.empty(0, device="cpu", requires_grad=True).view(0).grad_fn,
        "torch.autograd.function.BackwardCFunction": getattr(torch.autograd.Function, "_backward_cls", None),
        "torch._ops.OpOverload": torch.ops.aten.add.Tensor,
        "torch._subclasses.FakeTensorMode": _look_up("torch._subclasses.FakeTensorMode")(),
    }


def _takes(name: str, wanted: tuple[str, ...]) -> bool:
    """Return True if a function has these parameters, and no other required ones."""
    try:
        parameters = inspect.signature(_look_up(name)).parameters
    except (AttributeError, ImportError):
        return True  # reported as missing
    needed = {key for key, p in parameters.items() if p.default is p.empty and p.kind < p.VAR_POSITIONAL}
    return needed <= set(wanted) <= set(parameters)


check()
