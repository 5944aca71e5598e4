# SPDX-License-Identifier: Apache-2.0
"""docs/singa.md names what is there, and nothing else."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from singa_lite import autograd, data, device, initializer, layer, opt, tensor
from singa_lite.autograd import ops

PAGE = (Path(__file__).parents[1] / "docs" / "singa.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))

# names and first arguments of SINGA 5
SIGNATURES = {
    device: """
        get_num_gpus() get_gpu_ids() get_gpu_mem_size(id) device_query(id,verbose) create_cpu_device()
        create_cuda_gpus(num) create_cuda_gpu() create_cuda_gpus_on(device_ids) create_cuda_gpu_on(device_id)
        get_default_device()
    """,
    tensor: """
        from_raw_tensor(t) from_raw_tensors(tt) zeros_like(t) ones_like(t) product(shape) sizeof(dtype)
        contiguous(tensor) reshape(tensor,shape) transpose(t,axes)
        copy_data_to_from(dst,src,size,dst_offset,src_offset) from_numpy(np_array,dev) to_host(t) to_numpy(t)
        abs(t) exp(t) ceil(t) log(t) sigmoid(t) sign(t) sqrt(t) square(t) tanh(t) sum(t,axis,out) pow(t,x,out)
        average(t,axis) softmax(t,out) lt(t,x) le(t,x) gt(t,x) ge(t,x) eq(t,x) add(lhs,rhs,ret)
        sub(lhs,rhs,ret) eltwise_mult(lhs,rhs,ret) mult(A,B,C,alpha,beta) einsum(ops,args)
        repeat(t,repeats,axis) tensordot(A,B,axes) div(lhs,rhs,ret) axpy(alpha,x,y) bernoulli(p,t)
        gaussian(mean,std,t) uniform(low,high,t) add_column(alpha,v,beta,M) add_row(alpha,v,beta,M)
        sum_columns(M) sum_rows(M) copy_from_numpy(data,np_array) concatenate(tensors,axis)
        random(shape,device) zeros(shape,device) ones(shape,device)
    """,
    autograd: """
        gradients(y,dy) backward(y,dy) relu(x) less(x,y) clip(x,min,max) matmul(x,w) greater(x,y)
        add_bias(x,b,axis) reshape(x,shape) add(a,b) elu(x,alpha) equal(x,y) softmax(x,axis)
        binary_cross_entropy(x,t) cross_entropy(x,t) ranking_loss(pos,neg,M) softmax_cross_entropy(x,t)
        mse_loss(x,t) flatten(x,axis) cat(xs,axis) tanh(x) sigmoid(x) mul(x,y) unsqueeze(x,axis)
        transpose(x,shape) abs(a) exp(a) leakyrelu(x,a) pow(a,b) sqrt(x) sub(a,b) log(x) squeeze(x,axis)
        div(a,b) negative(x) gemm(A,B,C,alpha,beta,transA,transB) reduce_sum(x,axes,keepdims)
        reduce_mean(x,axes,keepdims) slice(x,starts,ends,axes,steps) split(x,axis,parts,num_output)
        gather(x,axis,indices) tile(x,repeats) cast(x,to) cossim(a,b) pad(x,mode,pads,constant)
        where(x,y,condition) embedding(x,w)
    """,
}


def names_in(text: str) -> set[str]:
    """Every word in backticks; words joined by blanks count one by one."""
    return {word for quoted in re.findall(r"`([^`]*)`", text) for word in quoted.split()}


def test_every_public_operator_and_layer_is_on_the_page() -> None:
    assert set(ops.__all__) <= names_in(ROWS["autograd"])
    assert names_in(ROWS["layer"]) == set(layer.__all__)


@pytest.mark.parametrize("module", [autograd, initializer, opt])
def test_every_name_on_the_page_exists(module: object) -> None:
    named = names_in(ROWS[module.__name__.split(".")[-1]])
    assert not {name for name in named if not hasattr(module, name)}


def test_every_tensor_function_on_the_page_exists() -> None:
    assert not {name for name in names_in(ROWS["tensor"]) if not hasattr(tensor, name)}


def test_what_the_page_calls_missing_is_missing() -> None:
    missing = PAGE.split("## Missing")[1]
    for module, held in (("autograd", autograd), ("data", data), ("layer", layer), ("opt", opt)):
        entry = re.search(rf"^- `{module}`:(.*?)(?=^- |\Z)", missing, re.MULTILINE | re.DOTALL)
        assert not {name for name in names_in(entry[1] if entry else "") if hasattr(held, name)}
    assert not hasattr(device, "enable_lazy_alloc")
    assert {"ImageBatchIter", "utils", "Matmul", "ctensor2numpy"} <= names_in(missing)
    assert importlib.util.find_spec("singa_lite.utils") is None


@pytest.mark.parametrize("module", SIGNATURES)
def test_arguments_have_the_names_and_order_that_they_have_in_singa(module: object) -> None:
    for word in SIGNATURES[module].split():
        name, _, rest = word.rstrip(")").partition("(")
        expected = [argument for argument in rest.split(",") if argument]
        assert list(inspect.signature(getattr(module, name)).parameters)[: len(expected)] == expected, name
